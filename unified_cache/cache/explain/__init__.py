"""Explanations of a prompt's hit: how far each tier and component goes, and why what is missing is missing.

cached       explains a prompt to the engine of a cache; a store alone is explained by the command line
stored       which pages a store has, under the prompt's own name and under others that are near
explanation  the value that ``UnifiedCache.explain`` returns, made of what the tiers hold now; as text and JSON
"""
