"A full disk, for the tests of what is saved"
import resource
import signal
from contextlib import contextmanager


@contextmanager
def small_files(limit):
    "No file may grow beyond `limit` bytes: to a writer, a full disk"
    before, old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try: yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)
