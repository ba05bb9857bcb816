"A headless Chromium, spoken to over its DevTools protocol, and a server on loopback for it to look at"
import base64, contextlib, functools, http.server, io, itertools, json, os, shutil, subprocess, tempfile, threading, time
from pathlib import Path

from websockets.sync.client import connect

CHROMIUM = next((p for name in ('chromium', 'chromium-browser', 'google-chrome') if (p := shutil.which(name))), None)


class Handler(http.server.SimpleHTTPRequestHandler):
    "Serves a folder, and remembers what was asked for in vain"
    def log_message(self, *_): pass
    def send_error(self, code, *args, **kw):
        self.server.failed.append((code, self.path))
        super().send_error(code, *args, **kw)


class Server:
    "A folder on 127.0.0.1, at a free port: `url`; `failed`: what wasn't there"
    def __init__(self, folder):
        self._http = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Handler, directory=str(folder)))
        self._http.failed = self.failed = []
        self.url = f'http://127.0.0.1:{self._http.server_port}/'
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()


class Browser:
    "One tab. `events`: what the page logged, threw or asked the network for since `open`"
    def __init__(self):
        self._folder = tempfile.mkdtemp(prefix='chromium-')
        args = ['--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run', '--hide-scrollbars',
                '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1', '--disable-background-networking', '--disable-component-update', '--disable-features=BackForwardCache,MediaRouter,Translate',
                '--remote-debugging-port=0', f'--user-data-dir={self._folder}', 'about:blank']
        env = {**os.environ, 'HOME': self._folder}
        self._process = subprocess.Popen([CHROMIUM, *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        self._open = contextlib.ExitStack()
        self._socket = self._open.enter_context(connect(self._browser_url(), max_size=None))
        self._numbers, self._session, self.events = itertools.count(1), None, []
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        self._session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Network', 'Log'): self.call(f'{domain}.enable')

    def _browser_url(self, patience=30):
        port, start = Path(self._folder)/'DevToolsActivePort', time.monotonic()
        while time.monotonic() - start < patience:
            if self._process.poll() is not None: raise RuntimeError(f'{CHROMIUM} ended with status {self._process.returncode}')
            lines = port.read_text().split() if port.exists() else []
            if len(lines)==2: return f'ws://127.0.0.1:{lines[0]}{lines[1]}'
            time.sleep(.05)
        raise TimeoutError(f'{CHROMIUM} opened no port for its DevTools')

    def call(self, method, **params):
        "The result of one command; events that come in between are kept"
        number = next(self._numbers)
        self._socket.send(json.dumps(dict(id=number, method=method, params=params) | ({'sessionId': self._session} if self._session else {})))
        while True:
            said = json.loads(self._socket.recv(timeout=60))
            if said.get('id') == number: break
            if 'method' in said: self.events.append(said)
        if 'error' in said: raise RuntimeError(f'{method}: {said["error"]["message"]}')
        return said['result']

    def wait(self, method):
        "Wait for an event"
        while not any(e['method'] == method for e in self.events): self.events.append(json.loads(self._socket.recv(timeout=60)))

    def open(self, url):
        "Load a page, until everything in it has loaded"
        self.events = []
        self.call('Page.navigate', url=url)
        self.wait('Page.loadEventFired')

    def eval(self, code):
        "The value of an expression in the page; a promise is waited for"
        said = self.call('Runtime.evaluate', expression=code, returnByValue=True, awaitPromise=True)
        if 'exceptionDetails' in said: raise RuntimeError(said['exceptionDetails']['exception'].get('description', said))
        return said['result'].get('value')

    def until(self, code, patience=15):
        "Wait until an expression is true in the page; its value"
        start = time.monotonic()
        while not (value := self.eval(code)):
            if time.monotonic() - start > patience: raise TimeoutError(f'never came true: {code}')
            time.sleep(.05)
        return value

    def type(self, text):
        "Keys, as from a keyboard"
        for c in text:
            for kind in ('keyDown', 'keyUp'): self.call('Input.dispatchKeyEvent', type=kind, text=c if kind == 'keyDown' else '', key=c)

    def size(self, width, height=900, mobile=False):
        "Make the window so large"
        self.call('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, scheme):
        "Prefer 'light' or 'dark' pages, as a system's setting does"
        self.call('Emulation.setEmulatedMedia', features=[dict(name='prefers-color-scheme', value=scheme)])

    def screenshot(self, path, full=False):
        "A picture of the window, or of the whole page"
        data = self.call('Page.captureScreenshot', format='png', captureBeyondViewport=full)['data']
        Path(path).write_bytes(base64.b64decode(data))

    def picture(self):
        "The window as a picture of PIL"
        from PIL import Image
        time.sleep(.3)      # what is decoded late is painted late
        return Image.open(io.BytesIO(base64.b64decode(self.call('Page.captureScreenshot', format='png')['data']))).convert('RGB')

    def complaints(self):
        "What went wrong in the page: exceptions, errors in the console, what did not load"
        for e in self.events:
            p = e['params']
            if e['method'] == 'Runtime.exceptionThrown': yield p['exceptionDetails'].get('exception', {}).get('description') or str(p)
            elif e['method'] == 'Runtime.consoleAPICalled' and p['type'] in ('error', 'assert'): yield ' '.join(str(o.get('value')) for o in p['args'])
            elif e['method'] == 'Log.entryAdded' and p['entry']['level'] == 'error': yield f'{p["entry"]["text"]} {p["entry"].get("url", "")}'
            elif e['method'] == 'Network.loadingFailed' and not p.get('canceled'): yield p['errorText']

    def asked(self):
        "Addresses that the page asked for"
        return [e['params']['request']['url'] for e in self.events if e['method'] == 'Network.requestWillBeSent']

    def close(self):
        self._session = None
        self.call('Browser.close')
        self._process.wait(20)
        self._open.close()
        shutil.rmtree(self._folder, ignore_errors=True)
