"Which transitions come next. Importing one sampler imports all, so that `sampler_from` knows them"
from . import more, rank

__all__ = ['more', 'rank']
