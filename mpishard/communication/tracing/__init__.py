"""Traces: spans of the activity of each rank, and the files that hold them.

The lowest chapter: it imports no other. `Recorder` (recorder.py) takes events and writes the rank's
file; `start_recording` compares the ranks' clocks and opens it. Begin with `Recorder.add`.
"""
