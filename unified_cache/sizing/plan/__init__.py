"""Plan of what to buy: hit ratios of many tier sizes from one pass over a trace, and what they bring in time and money.

``replay`` numbers the pages of a trace, and knows the stack of lru and the clairvoyant bound; upon that stand

resume_points where a model with windows or states could resume, and what memory that would have taken
tier_hits     both together: the hits of any sizes of the tiers; of other policies than lru by replays
sweep         sizes to try, and the model that they are for
hardware      speeds and prices; costs: queues and money that follow
planner       all combinations, and what is recommended; report: for people
"""
