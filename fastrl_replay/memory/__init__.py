"""`ReplayMemory`: a storage and a sampler joined, in one process; `DeviceMemory`: all of it on one torch device"""
from .. import show      # noqa: F401   (with it, batches have pictures)
from .device import DeviceMemory
from .kept import ReplayMemory

__all__ = ['DeviceMemory', 'ReplayMemory']
