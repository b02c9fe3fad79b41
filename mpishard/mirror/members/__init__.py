"""Documented members of native classes, which inherit them through `mpishard.base.mirrored`."""
