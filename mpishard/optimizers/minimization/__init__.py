"""Minimizing a function of a vector: `minimize`, for people who have a loss and a gradient.

`minimize` wraps the function as a black box, runs a rule of `rules.search` on it through
`sharded`, and decides when to stop; `objective` has that black box. This chapter imports from
`loop`, `rules` and `sharded`.
"""
