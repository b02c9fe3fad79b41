"""Threads of one process as ranks.

world    the state that the ranks share: rendezvous, messages, failures
backend  `InMemoryCommunicationBackend`: a rank's life cycle, waiting, collectives and messages
run      `run_in_threads`: a function on several ranks, and the failure of any of them
"""
