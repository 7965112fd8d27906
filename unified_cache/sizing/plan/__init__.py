"""Plan of what to buy: hit ratios of many tier sizes from one pass over a trace, and what they bring in time and money.

``trace_pages`` numbers the pages of a trace, and ``lru_stack`` says how much memory each would have needed to be held;
upon that stand ``resume_points``, ``tier_hits``, ``costs`` and ``planner``, in this order.
"""
