"""Where the time of a step goes: to which layers, and to which kinds of parts."""

from zoo.profiling.profile import profile_step
from zoo.profiling.provenance import provenance

__all__ = ["profile_step", "provenance"]
