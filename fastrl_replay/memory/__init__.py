"""`ReplayMemory`: a storage and a sampler joined, in one process"""
from .kept import ReplayMemory

__all__ = ['ReplayMemory']
