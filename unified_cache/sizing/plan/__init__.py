"""Plan of what to buy: hit ratios of many tier sizes from one pass over a trace, and what they bring in time and money.

``replay`` numbers the pages of a trace, and knows the stack of lru and the clairvoyant bound; upon that stand
``resume_points``, ``tier_hits``, ``costs`` and ``planner``, in this order.
"""
