"""Question and answer pairs that every machine has: the standard library's own documentation."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# A fixed list, not whatever is importable: the data should not change with what else is installed.
# Modules that open windows, print on import or exist on one platform only are left out.
MODULES = """
    abc argparse array ast asyncio base64 bdb binascii bisect builtins bz2 calendar cmath cmd code codecs
    collections collections.abc concurrent.futures configparser contextlib contextvars copy copyreg csv ctypes
    dataclasses datetime decimal difflib dis doctest email.message email.parser email.policy email.utils enum
    filecmp fileinput fnmatch fractions ftplib functools gc getopt getpass gettext glob graphlib gzip hashlib heapq
    hmac html html.parser http.client http.cookiejar http.cookies http.server imaplib importlib importlib.abc
    importlib.metadata importlib.resources importlib.util inspect io ipaddress itertools json keyword linecache
    locale logging logging.config logging.handlers lzma mailbox marshal math mimetypes mmap
    multiprocessing.connection multiprocessing.managers multiprocessing.pool multiprocessing.queues
    multiprocessing.shared_memory netrc numbers operator optparse os os.path pathlib pdb pickle pickletools pkgutil
    platform plistlib poplib posixpath pprint profile pstats py_compile pyclbr pydoc queue quopri random re reprlib
    runpy sched secrets select selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3 ssl
    stat statistics string stringprep struct subprocess symtable sys sysconfig tabnanny tarfile tempfile textwrap
    threading time timeit token tokenize trace traceback tracemalloc types typing unicodedata unittest unittest.case
    unittest.mock urllib.error urllib.parse urllib.request urllib.robotparser uuid venv warnings wave weakref
    wsgiref.handlers wsgiref.simple_server xml.dom.minidom xml.dom.pulldom xml.etree.ElementTree xml.sax.handler
    xmlrpc.client xmlrpc.server zipapp zipfile zipimport zlib zoneinfo
""".split()  # noqa: SIM905

Documented = tuple[str, object]


def _own(obj: object, module: ModuleType) -> bool:
    """Re-exports would ask about the same thing twice."""
    home = getattr(obj, "__module__", None)
    return home is None or home.lstrip("_").split(".")[0] == module.__name__.lstrip("_").split(".")[0]


def _documented(module: ModuleType) -> Iterator[Documented]:
    for name, obj in sorted(vars(module).items()):
        if name.startswith("_") or not (inspect.isroutine(obj) or inspect.isclass(obj)) or not _own(obj, module):
            continue
        yield f"{module.__name__}.{name}", obj
        if inspect.isclass(obj):
            for attribute, member in sorted(vars(obj).items()):
                member = getattr(member, "__func__", member)
                if not attribute.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
                    yield f"{module.__name__}.{name}.{attribute}", member


def _question(name: str, obj: object) -> str:
    if inspect.isclass(obj):
        return f"What is the class `{name}` for?"
    if isinstance(obj, property):
        return f"What does the property `{name}` hold?"
    try:
        signature = str(inspect.signature(obj))  # type: ignore[arg-type]
    except Exception:  # builtins carry signatures as text, and evaluating it can fail in any way
        signature = ""
    # Defaults that show an address, an unordered set or a path of this machine would make each run ask something else.
    if re.search(r" at 0x|[{</\\]", signature):
        signature = ""
    return f"What does `{name}{signature}` do?"


def docstring_pairs() -> list[dict[str, str]]:
    """All pairs, in an order that does not depend on the process."""
    with warnings.catch_warnings():
        # Looking at a deprecated name is enough to be warned about it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _collect()


def _collect() -> list[dict[str, str]]:
    pairs: list[dict[str, str]] = []
    seen: set[str] = set()
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # e.g. a Python that was built without sqlite3
            continue
        for name, obj in _documented(module):
            doc = getattr(obj, "__doc__", None)
            if not isinstance(doc, str) or len(answer := inspect.cleandoc(doc)) < 16 or answer in seen:
                continue
            seen.add(answer)
            pairs.append({"question": _question(name, obj), "answer": answer})
    return pairs


def write_docstring_pairs(path: Path) -> int:
    pairs = docstring_pairs()
    path.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs), encoding="utf-8")
    return len(pairs)
