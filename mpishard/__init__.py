"""mpishard."""
from mpishard.communication import *
