"""`ReplayMemory`: a storage and a sampler joined, in one process; `DeviceMemory`: all of it on one torch device"""
import sys
from .. import show      # noqa: F401   (with it, batches have pictures)
from . import replay_memory
from ..samplers import eligible
from .device import DeviceMemory
from .replay_memory import ReplayMemory

__all__ = ['DeviceMemory', 'ReplayMemory']

# Where earlier versions had what they pickled
sys.modules[f'{__name__}.kept'] = replay_memory
sys.modules[f'{__name__}.pruned'] = eligible
