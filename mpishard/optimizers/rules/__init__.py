"""Update rules: the settings of each, and the arithmetic of its update.

Begin with `elementwise`: six rules, each a dataclass of settings with one body. `compiled` runs a
body: NumPy or CuPy on chunks, or numba's machine code. `lamb` needs norms of whole parameters;
`lbfgs` needs the loss at several points, on the line of `strong_wolfe`. `device_code` makes a
kernel for GPUs of a body.
`rule.Optimizer` is the base of all rules; `pieces` are the arguments of an update, `options` the
settings of single parameters by name, `schedules` learning rates by step.

`plain` runs a rule without ranks. This chapter imports from no other one.
"""
