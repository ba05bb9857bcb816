"""The notebooks as the site shows them: source folded, with what it defines named above it; figures with captions."""
import ast, json, re
from dataclasses import dataclass, field
from pathlib import Path

import examples, reference

EXPORT = re.compile(r'^#\| ?exports?i? *$\n?', re.M)
OPTION = re.compile(r'^#\| ?(fig-cap|fig-alt) ?: *(.*)\n', re.M)
TO_COPY = 'index', 'start/', 'howto/'        # pages whose examples are to be copied with their imports
INSIDE = '*For contributors.*', '*For the curious.*'       # the first words of such a chapter
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def plain(name):
    "`2_learning/02_stepper.ipynb` → `learning/stepper.ipynb`: a path without the numbers that order it"
    return re.sub(r'(^|/)\d+[a-zA-Z0-9]*_(?=[^/])', r'\1', name)


@dataclass
class Chapter:
    """A notebook: its page (without an ending), title, module if it exports one, and the place of each name's source;
    `inside`: is it for contributors or the curious alone?"""
    path: Path
    page: str
    title: str = ''
    module: str | None = None
    inside: bool = False
    sources: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path, nbs):
        new = cls(path, plain(path.relative_to(nbs).as_posix()).removesuffix('.ipynb'))
        cells = [(c, ''.join(c['source'])) for c in json.loads(path.read_text(encoding='utf-8'))['cells']]
        for c, text in cells:
            if not new.title and c['cell_type'] == 'markdown' and (m := re.match(r'# +(.*)', text)):
                new.title = m[1].strip()
            new.inside |= c['cell_type'] == 'markdown' and text.startswith(INSIDE)
            if m := re.match(r'#\| ?default_exp (\S+)', text): new.module = m[1]
            if c['cell_type'] == 'code' and EXPORT.search(text):
                names = defined(text)
                for name in names: new.sources.setdefault(name, f'source-{names[0]}')
        return new


def defined(code):
    "The functions, classes and constants that a cell defines at its top; of methods added by `@patch`, their names"
    found = []
    for o in ast.parse(code).body:
        if isinstance(o, (*FUNCTIONS, ast.ClassDef)): found.append(o.name)
        elif isinstance(o, ast.Assign): found += [t.id for t in o.targets if isinstance(t, ast.Name)]
        elif isinstance(o, ast.AnnAssign) and isinstance(o.target, ast.Name): found.append(o.target.id)
    return [*dict.fromkeys(found)]


def is_import(o): return isinstance(o, ast.Import | ast.ImportFrom)


def is_check(o):
    "Is it an assertion, or a call of a function of fastcore.test, or a loop over such?"
    if isinstance(o, ast.For | ast.With): return all(map(is_check, o.body))
    if not (isinstance(o, ast.Expr) and isinstance(o.value, ast.Call)): return isinstance(o, ast.Assert)
    return ast.unparse(o.value.func).startswith(('test_', 'ExceptionExpected'))


def folded(code, summary, label=None):
    "Code behind a line that opens it"
    return '#| code-fold: true\n' + f'#| code-summary: "{summary}"\n' + (f'#| label: {label}\n' if label else '') + code


def fold(code, imports=True):
    "An example, folded if it only imports (unless its imports are to be seen) or only checks"
    try: body = ast.parse(re.sub(r'^[%!].*$', '', code, flags=re.M)).body
    except SyntaxError: return code
    if body and all(map(is_import, body)): return folded(code, 'Imports') if imports else code
    if body and all(is_import(o) or is_check(o) for o in body): return folded(code, 'Checks')
    return code


def exported(code, chapter, ref):
    "What stands for an exported cell: a list of what it defines, and its source, folded. Only imports: nothing"
    code = EXPORT.sub('', code, count=1)
    body = ast.parse(code).body
    if all(map(is_import, body)): return
    names = [n for n in defined(code) if not n.startswith('_')]
    entries = [e for n in names if (e := ref.find(n, chapter.module)) and e.module == chapter.module]
    if entries:
        lines = [defines(e, chapter, ref) for e in entries]
        yield {'cell_type': 'markdown', 'metadata': {}, 'source': '::: {.defines}\n' + '\n'.join(lines) + '\n:::'}
    every = defined(code)
    said = ', '.join(n for n in names or every if len(n) > 1)
    label = chapter.sources[every[0]] if every else None
    yield code_cell(folded(code.lstrip('\n'), f'Source: {said}' if said else 'Source', label))


def defines(entry, chapter, ref):
    "What a chapter says of an entry of the reference, in an item of a list"
    says = ref.linked(entry.line, chapter.page, entry.module, [entry.name])
    return f'- {ref.link(entry, chapter.page, short(entry))}: {says}'


def short(entry, width=70):
    "A signature without types, as a call"
    sig = reference.signature(entry)
    if sig is None: return entry.name
    bare = sig.replace(return_annotation=sig.empty, parameters=[p.replace(annotation=p.empty) for p in
                                                                sig.parameters.values()])
    text = f'{entry.name}({", ".join(reference.arguments(bare))})'
    return text if len(text) <= width else text[:width].rpartition(', ')[0] + ', …)'


def code_cell(source, outputs=()):
    return {'cell_type': 'code', 'metadata': {}, 'execution_count': None, 'source': source, 'outputs': [*outputs]}


def sentence(prose):
    "The last sentence of a text, without headings and markup: what leads to the figure below it"
    last = prose.strip().split('\n\n')[-1]
    text = re.sub(r'^#+ .*$', '', last, flags=re.M).strip() or last.lstrip('# ')
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', text)
    text = ' '.join(re.sub(r'[`*$\\{}]|\b_|_\b', '', text).split()).rstrip(':')
    return re.split(r'(?<=[.!?)])\s+(?=[A-Z])', text)[-1]


def labels(code):
    "The title and the axes' labels that a cell gives to a plot"
    found = {}
    for o in ast.walk(ast.parse(re.sub(r'^[%!].*$', '', code, flags=re.M))):
        if not isinstance(o, ast.Call): continue
        name = o.func.attr if isinstance(o.func, ast.Attribute) else ''
        given = [(k.arg, k.value) for k in o.keywords]
        if o.args and name.startswith('set_'): given.append((name.removeprefix('set_'), o.args[0]))
        for k, v in given:
            if k in ('title', 'xlabel', 'ylabel') and isinstance(v, ast.Constant) and isinstance(v.value, str):
                found.setdefault(k, ' '.join(v.value.split()))
    return found


def caption(code):
    "What the labels of a plot say, in a line; empty where they say too little"
    found = labels(code)
    axes = ' against '.join(found[k] for k in ('ylabel', 'xlabel') if k in found)
    return ': '.join(filter(None, [found.get('title'), axes]))


def captioned(cell, code, prose, number):
    "The code of a cell that shows a figure, with a caption and a text for those who don't see it"
    if not any(k.startswith('image/') for o in cell['outputs'] for k in o.get('data', {})): return code
    given, code = dict(OPTION.findall(code)), OPTION.sub('', code)
    says, leads = caption(code), sentence(prose)
    cap = given.get('fig-cap') or says or leads
    alt = given.get('fig-alt') or given.get('fig-cap') or (f'Plot: {says}. {leads}' if says else leads)
    options = {'fig-cap': f'Figure {number}: {cap}', 'fig-alt': alt}
    return ''.join(f'#| {k}: {json.dumps(v, ensure_ascii=False)}\n' for k, v in options.items()) + code


def with_entries(text, chapter, ref):
    "A text in which each heading that is a name is followed by its signature and the first line of its description"
    def headed(m):
        e = ref.find(m[1])
        return m[0] + (f'\n::: {{.defines}}\n{defines(e, chapter, ref)}\n:::\n\n' if e else '')
    return examples.NAME.sub(headed, text)


def shown(chapter, ref):
    "The cells of a chapter as the site shows them"
    prose, figures = '', 0
    for n, cell in enumerate(json.loads(chapter.path.read_text(encoding='utf-8'))['cells']):
        text = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown':
            prose = text
            new = ref.linked(text, chapter.page, chapter.module) if n else text
            yield {**cell, 'source': with_entries(new, chapter, ref) if chapter.page == examples.PAGE else new}
        elif cell['cell_type'] != 'code' or re.match(r'#\| ?(hide|default_exp)', text): yield cell
        elif EXPORT.search(text): yield from exported(text, chapter, ref)
        else:
            text = re.sub(r'^#\| ?(slow|notest) *\n', '', text)
            new = captioned(cell, text, prose, figures + 1)
            figures += new != text
            yield {**cell, 'source': fold(new, imports=not chapter.page.startswith(TO_COPY))}
