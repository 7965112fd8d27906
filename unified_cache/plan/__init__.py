"""Plan of what to buy: hit ratios of many tier sizes from one pass over a trace, and what they bring in time and money.

``replay`` numbers the pages of a trace, and knows the stack of lru and the clairvoyant bound; upon that stand

resume_points where a model with windows or states could resume, and what memory that would have taken
tier_hits     both together: the hits of any sizes of the tiers
policy_hits   other policies than lru: some sizes replayed, the others between them
sweep         sizes to try, and the model that they are for
hardware      speeds and prices; costs: queues and money that follow
evaluate      one combination; planner: all of them, and what is recommended
result        what was found; summary: in words; report: as a page
"""
