"One memory in many processes, on many machines, with Ray (the extra `ray`); importing this needs no Ray"
from .memory import RayMemory
from .replay import RayActors, RayParams, RayPusher, RayReplay

__all__ = ['RayActors', 'RayMemory', 'RayParams', 'RayPusher', 'RayReplay']
