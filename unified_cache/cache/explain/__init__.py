"""Explanations of a prompt's hit: how far each tier and component goes, and what became of what is missing.

cached       explains a prompt to the engine of a cache; a store alone is explained by the command line
near         the same tokens under another namespace, or in storage under another identity
explanation  the value that ``UnifiedCache.explain`` returns, made of histories of pages; as text and JSON
"""
