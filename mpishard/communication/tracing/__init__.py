"""Record the activity of ranks over time: `recorder`, start and stop (`session`), the `file`."""
