"""Record the activity of ranks over time: `recorder` and its file, start and stop (`session`)."""
