"""Lines of text that show which pages of a prompt are held: one character for one page or for several."""

from collections.abc import Sequence

__all__ = ["LINE_COLUMNS", "lane_line", "pages_text"]

LINE_COLUMNS = 48
"""Characters of a line at most; a longer prompt has several pages in each."""

_HELD, _PARTLY, _MISSING, _WINDOW = "#", "+", ".", "="


def lane_line(held: Sequence[tuple[int, int]], needed: tuple[int, int], pages: int) -> str:
    """Draw the pages of a prompt: ``=`` held and needed for the resume, ``#`` held, ``+`` held in part, ``.`` missing.

    ``held`` are runs [start, end), ascending; ``needed`` is the window of the resume.
    """
    columns = min(pages, LINE_COLUMNS)
    line: list[str] = []
    for column in range(columns):
        start, end = column * pages // columns, (column + 1) * pages // columns
        count = sum(max(min(end, last) - max(start, first), 0) for first, last in held)
        if count == end - start:
            line.append(_WINDOW if needed[0] < end and start < needed[1] else _HELD)
        else:
            line.append(_PARTLY if count else _MISSING)
    return "".join(line)


def pages_text(pages: int) -> str:
    """Say a number of pages."""
    return "1 page" if pages == 1 else f"{pages:,} pages"
