"""The exceptions of mpishard: those of `mpishard.base.errors`, where users look for them."""

from mpishard.base.errors import *  # noqa: F403
