"""Explanations of a prompt's hit: how far each tier and component goes, and what became of what is missing.

In the order in which an explanation is made:

    histories        what became of each page of a prompt, one array for each component on each tier
    remembered   the same, as a cache's tree and its memory of what has gone tell it
    near         the same tokens under another namespace, or in storage under another identity
    reasons      reason why a run of pages is missing, with what is known of it
    explanation  the value that ``UnifiedCache.explain`` returns
    picture      the same as text
    cached       puts them together for a cache; a store alone is explained by the command line
"""
