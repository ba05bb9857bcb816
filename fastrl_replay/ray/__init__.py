"One memory in many processes, on many machines, with Ray (the extra `ray`); importing this needs no Ray"
from .memory import RayMemory
from .pusher import RayPusher
from .replay import RayActors, RayParams, RayReplay

__all__ = ['RayActors', 'RayMemory', 'RayParams', 'RayPusher', 'RayReplay']
