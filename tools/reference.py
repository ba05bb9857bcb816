"""What the package offers, from the live objects: an entry for every public name and method, and where it stands.

`Reference()` imports the modules of the package. `pages()` gives a page of Markdown for each name of `all`, one for
each module with what else is in it, and an index of all names; `link(name)` says where an entry is, for the links in
the rest of the site.
"""
import ast, importlib, importlib.util, inspect, re, sys, textwrap
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from types import ModuleType
from typing import Any, Protocol

from fastcore.docments import docments

from examples import Example

LIB = 'fastrl_replay'
# Names for users that are neither in `all` nor in `ray`, by module: adapters, and what methods return or raise
FOR_USERS = {
    'interop.sb3': '''ReplayBuffer DictReplayBuffer HerReplayBuffer PrioritizedReplayBuffer
        PrioritizedDQN PrioritizedSAC PrioritizedTD3''',
    'interop.torchrl': 'ReplayBuffer',
    'interop.tianshou': 'VectorReplayBuffer PrioritizedVectorReplayBuffer',
    'interop.rllib': 'EpisodeReplayBuffer',
    'ray.shard': 'ShardLost ShardDied ShardSlow',
    'testing': 'check_sampler check_memory check_storage check_pipe NaiveMemory',
    'mixed': 'MixedBatch', 'health': 'Health', 'learner': 'q_targets dqn_loss', 'protocol': 'Memory',
    'storage.choice': 'Estimate', 'storage.mapped': 'View PowerCut', 'storage.sequences': 'SequenceBatch',
    'pipes.hindsight': 'HindsightBatch'}
# Methods that the library's own parts call: they stand after those for users
PARTS = frozenset('''arrays empty of_arrays saved restore news episode_index in_worker waiting read_waiting take_waiting
     begin watch add_run draw_into enter update_ids n_entered note_largest kept_priorities rebuild write mass
     least_priority set_largest set_alpha priorities_in learned coverage check_options'''.split())
# What a parameter of this name means wherever nothing else is said of it
WORDS = {
    'id': 'the number of a stored transition', 'ids': 'numbers of stored transitions, (m,)',
    'slots': 'positions in the ring, int64 (m,)', 'bs': 'how many rows', 'field': 'the name of a field',
    'fields': 'names of columns, if not all', 'step': 'one step, a `NamedTuple`',
    'chunk': 'several steps: a `Batch`, a list, or a step of stacked arrays', 'batch': 'a `Batch`',
    'streams': 'whose step each row is, (m,)', 'td_errors': 'one for each row, (m,)',
    'priority': 'finite and ≥ 0', 'priorities': 'finite and ≥ 0, one for each row, (m,)',
    'within_episode': 'stop where the episode ends?', 'folder': 'the path of a folder', 'timeout': 'in seconds',
    'gamma': 'the discount factor', 'model': 'a torch module', 'state': 'what `state_dict` or `get_state` returned',
    'source_datapipe': 'the pipe or iterable that the items come from',
    'pieces': 'the rows, as `saved` returned them', 'seen': 'how far it is known what was stored'}
WIDTH = 96                                              # of a signature
# What a variable of this name holds in the text of a chapter: `memory.add` is `ReplayMemory.add`
USUAL = {'memory': 'ReplayMemory', 'batch': 'Batch', 'replay': 'ExperienceReplay', 'learn': 'DQNLearner'}


@dataclass
class Entry:
    "One name: what it is, where it is defined, and the page and place of its description"
    name: str
    obj: Any
    module: str                       # without the package's name
    kind: str                         # class, function, method, property or constant
    owner: type | None = None         # of a method
    page: str = ''
    place: str = ''
    methods: list['Entry'] = field(default_factory=list)
    example: Example | None = None

    @property
    def doc(self):
        "Its docstring; of a class that is not ours, the first paragraph"
        text = inspect.getdoc(self.obj) or ''
        return text if self.kind != 'class' or ours(self.obj) else text.partition('\n\n')[0]

    @property
    def has_page(self): return self.page == f'reference/{self.name}'

    @property
    def line(self):
        "The first sentence of the docstring, on one line"
        first = ' '.join(self.doc.split('\n\n')[0].split())
        return re.split(r'(?<=[^.]\.)\s+(?=[A-Z])', first)[0]


def plain_function(obj):
    "The Python function in a class method, a compiled function or a wrapper"
    obj = getattr(obj, '__func__', obj)
    if isinstance(obj, property): obj = obj.fget
    return inspect.unwrap(getattr(obj, 'py_func', obj))


def ours(cls): return cls.__module__.partition('.')[0] == LIB


def kind_of(cls, name):
    "What the attribute `name` of a class is; None where it needs no entry"
    raw = inspect.getattr_static(cls, name)
    if isinstance(raw, property): return 'property'
    if isinstance(raw, classmethod | staticmethod) or inspect.isfunction(raw): return 'method'


def methods_of(cls, bases):
    "Names of the public methods and properties that a class has from these of its bases, the lowest first"
    names = dict.fromkeys(n for c in reversed(bases) for n in c.__dict__ if not n.startswith('_'))
    return [n for n in names if kind_of(cls, n)]


def text_of(annotation):
    "An annotation as one would write it"
    text = inspect.formatannotation(annotation)
    return re.sub(r"(?:\b[A-Za-z_]\w*\.|~)+(?=\w)", '', text).replace('NoneType', 'None')


def default_text(value):
    if isinstance(value, float) and value in (float('inf'), -float('inf')): return f"float('{value}')"
    if isinstance(value, type) or inspect.isroutine(value): return value.__name__
    if type(value) is dict: return f"{{{', '.join(f'{default_text(k)}: {default_text(v)}' for k, v in value.items())}}}"
    if type(value) is tuple: return f"({', '.join(map(default_text, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def signature(entry):
    "The signature of an entry; None where there is none to speak of, as for an exception or a protocol"
    obj = entry.obj
    if entry.kind == 'property': return None
    if inspect.isclass(obj):
        if Protocol in obj.__bases__ or not any(ours(c) and {'__init__', '__new__'} & c.__dict__.keys()
                                                for c in obj.__mro__): return None
    try: sig = inspect.signature(obj if inspect.isclass(obj) else plain_function(obj))
    except (TypeError, ValueError): return None
    bound = entry.owner and not isinstance(inspect.getattr_static(entry.owner, entry.name.split('.')[1]), staticmethod)
    parameters = [*sig.parameters.values()][1 if bound else 0:]
    return sig.replace(parameters=[p for p in parameters if not p.name.startswith('_')])


def written(p):
    "A parameter as it stands in a signature"
    star = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
    text = star + p.name
    if p.annotation is not p.empty: text += f': {text_of(p.annotation)}'
    if p.default is p.empty: return text
    return text + (' = ' if p.annotation is not p.empty else '=') + default_text(p.default)


def arguments(sig):
    "The parameters as texts, with the bare `*` where the rest goes by name only"
    starred = False
    for p in sig.parameters.values():
        starred |= p.kind == p.VAR_POSITIONAL
        if p.kind == p.KEYWORD_ONLY and not starred:
            yield '*'
            starred = True
        yield written(p)


def head(entry):
    "The signature of an entry as a line of code, or several"
    sig = signature(entry)
    if entry.kind == 'property':
        kind = inspect.get_annotations(entry.obj.fget).get('return')
        return f'{entry.name}: {text_of(kind)}' if kind else entry.name
    word = 'class ' if entry.kind == 'class' else ''
    if sig is None: return word + entry.name
    args, returns = [*arguments(sig)], ''
    if entry.kind != 'class' and sig.return_annotation is not sig.empty:
        returns = f' -> {text_of(sig.return_annotation)}'
    line = f'{word}{entry.name}({", ".join(args)}){returns}'
    if len(line) <= WIDTH: return line
    wrapped = textwrap.wrap(', '.join(a.replace(' ', '\0') for a in args), WIDTH - 4)
    body = '\n'.join('    ' + o.replace('\0', ' ') for o in wrapped)
    return f'{word}{entry.name}(\n{body}\n){returns}'


# ---- what stands beside the parameters in the source

def field_comments(cls):
    "What stands beside the fields in the source of a class"
    text = textwrap.dedent(inspect.getsource(cls))
    lines, fields = text.splitlines(), [o for o in ast.parse(text).body[0].body if isinstance(o, ast.AnnAssign)]
    return {o.target.id: lines[o.end_lineno - 1][o.end_col_offset:].strip(' #') for o in fields}


def comments(obj):
    "What stands beside the parameters of a function, or the fields of a `NamedTuple` or dataclass"
    return field_comments(obj) if inspect.isclass(obj) else docments(plain_function(obj), args_kwargs=True)


def described_in(entry):
    "What describes the parameters of an entry, the nearest first: its function, that of a base, or the fields"
    cls = entry.owner or (entry.obj if entry.kind == 'class' else None)
    if cls is None: return [entry.obj]
    method, bases = entry.name.partition('.')[2] or '__init__', [c for c in cls.__mro__ if ours(c)]
    found = [c if method == '__init__' and (is_dataclass(c) or issubclass(c, tuple)) else c.__dict__.get(method)
             for c in bases]
    return [o for o in found if o is not None]


def meanings(entry, sig):
    "What each parameter means: what stands beside it, or beside that of the same name in a base class, or `WORDS`"
    sources = [*(comments(o) for o in described_in(entry)), WORDS]
    return {k: next((o[k] for o in sources if o.get(k)), '') for k in sig.parameters}


def cell(text): return text.replace('|', r'\|')


def code(text): return f'`{cell(text)}`' if text else ''


def table(entry):
    "The parameters of an entry, one to a row; nothing where it has none"
    sig = signature(entry)
    if not sig or not sig.parameters: return
    said = meanings(entry, sig)
    bare = '' if any(said.values()) else ' .bare'           # on a phone, which has room for meanings alone, not shown
    yield f'::: {{.parameters{bare}}}\n\n| parameter | type | default | meaning |\n|---|---|---|---|'
    for p in sig.parameters.values():
        star = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
        kind = '' if p.annotation is p.empty else text_of(p.annotation)
        default = '' if p.default is p.empty else default_text(p.default)
        yield f'| `{star}{p.name}` | {code(kind)} | {code(default)} | {cell(said[p.name])} |'
    yield '\n:::'


# ---- modules

@contextmanager
def stand_ins(name):
    """In place of each module that the module `name` imports names from and that can't be imported: one in which these
    names are empty classes. So an adapter has its page where the library that it adapts to is not installed."""
    source, made = importlib.util.find_spec(name).loader.get_source(name), []
    for o in ast.walk(ast.parse(source)):
        if not isinstance(o, ast.ImportFrom) or o.level or can_import(o.module): continue
        sys.modules[o.module] = module = ModuleType(o.module)
        vars(module).update({a.name: type(a.name, (), {}) for a in o.names})
        made.append(o.module)
    try: yield
    finally:
        for o in made: del sys.modules[o]
        if made: sys.modules.pop(name, None)        # whoever imports it for use is told what is missing


def can_import(name):
    try: importlib.import_module(name)
    except ImportError: return False
    return True


# ---- the pages

def page_of(module):
    "A page whose name begins with an underscore would not be built"
    return f'reference/modules/{module.strip("_").replace(".", "/")}'


class Reference:
    "The public names of the package; `chapters`: module → the `Chapter` that exports it; `examples`: by name"
    def __init__(self, chapters, examples=None):
        self.chapters = chapters
        self.modules = dict(self._load())
        self.chosen = self.modules['all'].__all__
        ray = importlib.import_module(f'{LIB}.ray')
        self.users = [o for m in (self.modules['all'], ray) for o in map(vars(m).get, m.__all__) if inspect.isclass(o)]
        pipes = self.modules['pipes.base'].IterDataPipe.functions
        self.forms = {getattr(form, '__wrapped__', None): name for name, form in pipes.items()}
        self.entries, self.by_module = {}, {}
        for name, module in self.modules.items(): self.by_module[name] = [*self._entries(name, module)]
        self._settle()
        for name, example in (examples or {}).items(): self._show(name, example)
        self._sort_methods([*(examples or {})])

    def _load(self):
        "All modules first: some add methods to the classes of others"
        for name in sorted(self.chapters):
            with stand_ins(f'{LIB}.{name}'): yield name, importlib.import_module(f'{LIB}.{name}')

    def _entries(self, name, module):
        if name == 'all': return
        for o in module.__all__:
            obj = getattr(module, o)
            kind = 'class' if inspect.isclass(obj) else 'function' if callable(obj) else 'constant'
            entry = Entry(o, obj, name, kind, page=f'reference/{o}' if self._is_chosen(o, obj) else page_of(name))
            if kind == 'class' and ours(obj):
                bases = [c for c in obj.__mro__ if ours(c) and (obj in self.described_with(c) or c.__name__[0] == '_')]
                entry.methods = [self._method(entry, m) for m in methods_of(obj, bases)]
            yield entry

    def _is_chosen(self, name, obj): return name in self.chosen and vars(self.modules['all'])[name] is obj

    def described_with(self, cls):
        "The classes with which the methods of `cls` are described: those for users that it is a part of, or itself"
        if cls in self.users: return [cls]
        whole = [o for o in self.users if cls in o.__mro__]
        return [o for o in whole if not any(b in whole for b in o.__mro__[1:])] or [cls]

    def _method(self, entry, name):
        raw = inspect.getattr_static(entry.obj, name)
        obj = raw if isinstance(raw, property) else getattr(entry.obj, name)
        return Entry(f'{entry.name}.{name}', obj, entry.module, kind_of(entry.obj, name), entry.obj, entry.page)

    def _settle(self):
        "Give each entry its place in its page, and remember by name those whose names are not ambiguous"
        first = {o: k for k, o in enumerate(self.chosen)}
        used = set()
        for entries in self.by_module.values():
            entries.sort(key=lambda e: first.get(e.name, len(first)))
            for e in [o for entry in entries for o in (entry, *entry.methods)]:
                if not e.has_page:
                    e.place = e.name.lower()
                    if (e.page, e.place) in used: e.place += f'-{len(used)}'
                    used.add((e.page, e.place))
                self.entries.setdefault(e.name, []).append(e)

    def is_public(self, entry):
        "Is it for users: in `all`, `ray` or `FOR_USERS`, or a method of such a class?"
        root, cls = entry.name.partition('.')[0], entry.owner or entry.obj
        named = root in self.chosen or root in FOR_USERS.get(entry.module, '').split()
        return named or any(cls is o for o in self.users)

    def is_part(self, entry):
        "Is it a method that the library's own parts call?"
        return entry.owner is not None and entry.name.partition('.')[2] in PARTS

    def _show(self, name, example):
        entry = self.find(name)
        if entry is None: raise ValueError(f'an example of {name}, which is no public name')
        entry.example = example

    def _sort_methods(self, shown):
        "What has an example comes first among the methods of a class, in the order of the examples"
        first = {name: k for k, name in enumerate(shown)}
        for entries in self.by_module.values():
            for e in entries: e.methods.sort(key=lambda m: first.get(m.name, len(first)))

    def public_modules(self):
        return [m for m, entries in self.by_module.items() if any(map(self.is_public, entries))]

    def find(self, name, module=None):
        """The entry of `name` as a text has it, seen from a chapter of `module`; None if there is none, or several.

        `interop.sb3.ReplayBuffer` tells by its module which of several it is."""
        home, _, last = name.rpartition('.')
        told = [e for e in self.by_module.get(home, []) if e.name == last and e.kind != 'constant']
        if told: return told[0]
        root, _, rest = name.partition('.')
        if rest and root in USUAL: return self.method(USUAL[root], rest)
        found = self.entries.get(name, [])
        near = [e for e in found if e.module == module]
        if len(near or found) != 1 or found[0].kind == 'constant': return self.method(root, rest) if rest else None
        entry = (near or found)[0]
        telling = self.is_public(entry) or entry.kind != 'function' or '_' in name or entry.module == module
        return entry if telling else None

    def method(self, cls, name):
        "The entry of a method of a class, which it may have from a base"
        for entry in self.entries.get(cls, []):
            for base in getattr(entry.obj, '__mro__', ()):
                for e in self.entries.get(f'{base.__name__}.{name}', []):
                    if e.owner is base: return e

    def link(self, entry, here, text=None):
        "A link to an entry from the page `here`"
        page = '' if entry.page == here else '../'*here.count('/') + entry.page + '.html'
        place = page or '#' if entry.has_page else f'{page}#{entry.place}'
        return f'[`{text or entry.name}`]({place})'

    def linked(self, text, here, module=None, known=()):
        "Markdown of the page `here` in which names in code lead to their entries, each for the first time"
        seen = set(known)

        def link(m):
            entry = self.find(m[1], module)
            if entry is None or entry.name in seen: return m[0]
            seen.add(entry.name)
            return self.link(entry, here, m[0].strip('`'))
        parts = re.split(r'(^```.*?^```|^    .*?$|^#.*?$|\[[^\]]*\]\([^)]*\))', text, flags=re.M | re.S)
        parts[::2] = [re.sub(r'(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)', link, o) for o in parts[::2]]
        return ''.join(parts)

    def entry(self, e, level):
        "One entry: heading, signature, description, parameters"
        if not e.has_page: yield f'{"#"*level} {e.name} {{#{e.place}}}'
        yield f'```python\n{head(e)}\n```'
        yield self.linked(e.doc, e.page, e.module, [e.name])
        yield '\n'.join(table(e))
        if e.kind == 'class' and e.obj in self.forms: yield f'In a pipeline: `pipe.{self.forms[e.obj]}(…)`'
        if e.example:
            yield self.linked(e.example.says, e.page, e.module, [e.name])
            yield from e.example.markdown(self.up(e.page))
        chapter = self.chapters[e.module]
        root = e.name.partition('.')[0]
        if e.owner is None and root in chapter.sources:
            yield f'[Source]({self.up(e.page)}{chapter.page}.html#{chapter.sources[root]}){{.source}}'
        if e.kind == 'class': yield from self._members(e, level)

    def up(self, page): return '../'*page.count('/')

    def _members(self, e, level):
        "The methods of a class, and links to those of its bases"
        parts = [*filter(self.is_part, e.methods)]
        methods = [m for m in e.methods if m not in parts]
        if len(methods) > 1: yield 'Methods: ' + self._row(methods, e.page)
        if parts: yield 'For other parts of the library: ' + self._row(parts, e.page)
        own = {m.name.partition('.')[2] for m in e.methods}
        whole = [self.link(self.entries[o.__name__][0], e.page) for o in self.described_with(e.obj) if o is not e.obj]
        if whole: yield f'A part of {", ".join(whole)}, with which its methods are described'
        for base in getattr(e.obj, '__mro__', ())[1:]:
            found = [o for o in self.entries.get(base.__name__, []) if o.obj is base]
            for b in found:
                rest = [m for m in b.methods if m.name.partition('.')[2] not in own and not self.is_part(m)]
                if rest: yield f'From {self.link(b, e.page)}: ' + self._row(rest, e.page)
        for m in [*methods, *parts]: yield from self.entry(m, level + 1)

    def _row(self, methods, here):
        return ' · '.join(self.link(m, here, m.name.partition('.')[2]) for m in methods)

    def page_of_name(self, e):
        "The page of a name of `all`"
        chapter = self.chapters[e.module]
        yield f'---\ntitle: "{e.name}"\ndescription: {e.line!r}\n---'
        up = self.up(e.page)
        yield (f'`from {LIB}.all import {e.name}`. The chapter: [{chapter.title}]({up}{chapter.page}.html). '
               f'The module: [{LIB}.{e.module}]({up}{page_of(e.module)}.html).')
        yield from self.entry(e, 1)

    def page(self, name):
        "The page of a module: what is not on a page of its own"
        here, chapter = page_of(name), self.chapters[name]
        entries = [e for e in self.by_module[name] if not e.has_page]
        doc = ' '.join((self.modules[name].__doc__ or '').split())
        yield f'---\ntitle: "{LIB}.{name}"\ndescription: {doc!r}\n---'
        yield f'The chapter: [{chapter.title}]({self.up(here)}{chapter.page}.html)'
        apart = [e for e in self.by_module[name] if e.has_page]
        if apart: yield 'On pages of their own: ' + ' · '.join(self.link(e, here) for e in apart)
        said = [e for e in entries if e.kind != 'constant']
        public = [*filter(self.is_public, said)]
        inside = [e for e in said if e not in public]
        for e in public: yield from self.entry(e, 2)
        is_mixed = bool(public or apart) and bool(inside)
        if is_mixed: yield '## Inside {#inside}\n\nWhat follows is for the library\'s own use, and may change.'
        for e in inside: yield from self.entry(e, 3 if is_mixed else 2)
        constants = [e for e in entries if e.kind == 'constant']
        if constants: yield '## Constants'
        for e in constants: yield f'[`{e.name} = {default_text(e.obj)[:80]}`]{{#{e.place}}}'

    def with_pages(self):
        "The names that have pages of their own"
        return [e for entries in self.by_module.values() for e in entries if e.has_page]

    def pages(self):
        "All pages: path without an ending → Markdown"
        for name, entries in self.by_module.items():
            if name == 'all': continue
            for e in entries:
                if e.has_page: yield e.page, '\n\n'.join(filter(None, self.page_of_name(e)))
            yield page_of(name), '\n\n'.join(filter(None, self.page(name)))
        yield 'reference/index', '\n\n'.join(self.index())

    def index(self):
        "The page of all names: first those that users need"
        yield ('---\ntitle: All names\ndescription: Every public name, one line, a link\nsearch: false\n---\n\n'
               f'`from {LIB}.all import *` brings the names of the first table. Those of the other tables are imported '
               'from their modules; the last section lists what the library is made of inside.')
        yield '## For users'
        yield self.rows([e for n in self.chosen for e in self.entries.get(n, [])[:1]])
        for m, entries in self.by_module.items():
            apart = [e for e in entries if self.is_public(e) and e.name not in self.chosen]
            if apart: yield f'## {LIB}.{m}\n\n{self.rows(apart)}'
        yield '## Inside'
        for m, entries in self.by_module.items():
            rest = [e for e in entries if not self.is_public(e)]
            if rest: yield f'### {LIB}.{m}\n\n{self.rows(rest)}'

    def rows(self, entries):
        here, lines = 'reference/index', ['| name | what it is |', '|---|---|']
        for e in entries:
            methods = self._row([m for m in e.methods if not self.is_part(m)], here)
            what = cell(e.line) if e.kind != 'constant' else f'= {code(default_text(e.obj)[:60])}'
            lines.append(f'| {self.link(e, here)} | {what}{"<br>" + methods if methods else ""} |')
        return '\n'.join(lines)
