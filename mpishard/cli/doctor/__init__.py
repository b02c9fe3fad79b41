"""``mpishard doctor``: checks of this installation, with a command that mends what is wrong."""
