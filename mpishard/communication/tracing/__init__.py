"""Traces: the spans of what each rank did, and the files that hold them.

The lowest chapter: it imports no other. `Recorder` (recorder.py) takes events and writes the rank's
file; session.py starts and stops it, and compares the ranks' clocks. Begin with `Recorder.add`.
"""
