"""`DeviceMemory`: rows, priorities, counters and random numbers on one torch device"""
from .memory import DeviceMemory

__all__ = ['DeviceMemory']
