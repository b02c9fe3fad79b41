"""The end of a job, in good order or not.

Begin with `hooks`: uncaught exceptions and the end of the process. `abort` reports and ends all
ranks; `watchdog` is the thread with the time limits, which also looks for dead ranks and receives
signals; `links` are connections between nodes; `report` shows an exception with a short traceback.
`stall` says why ranks wait: in the ranks' status pages it follows the waits from rank to rank, to
the odd one out or round a circle.
Imports `tracing` and `contract`.
"""
