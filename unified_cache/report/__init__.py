"""Pages that show results: one HTML file each, with charts, tables and sentences, and nothing from elsewhere.

A page needs the extra ``report``; charts and tables do not. In the order in which a result passes them:

    charts      what a chart shows: named series over positions or over categories, in one unit
    tables      rows under a title, for a page and for a terminal
    page        a headline, charts, tables and notes, written into one file
    page.html   its frame; page.css, light and dark; page.js, which draws with Chart.js 4.6.1, chart.umd.min.js, under
                the licence in chart.LICENSE.txt
"""
