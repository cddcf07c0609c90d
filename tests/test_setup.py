"""The files that set everything up say the same, and the house keeps its rules."""

import ast
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import jaxtyping
import pytest
import torch
from conftest import script_of
from packaging.requirements import Requirement

from oa_utils import machine, stats

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.lock").read_text().splitlines()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
LIBRARY = sorted((ROOT / "oa_utils").rglob("*.py"))
METHOD = [path for path in LIBRARY if path.parent.name != "paper"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
RUNNER = ROOT / "oa_utils" / "paper" / "notebooks.py"  # for those who have the extra `dev`


def plain(name: str) -> str:
    return re.split(r"[<>=\[]", name)[0].lower().replace("_", "-")


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# ---- packages


def test_the_lock_is_plain_pins_only():
    assert len(LOCK) > 50
    for line in LOCK:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_the_lock_has_everything_that_pyproject_names():
    pinned = {plain(line) for line in LOCK}
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    assert {plain(r) for r in PROJECT["dependencies"] + extras} <= pinned


def test_the_library_depends_on_what_it_imports_and_on_nothing_else():
    modules = {name.split(".")[0] for path in LIBRARY if path != RUNNER for name in imports(path)}
    outside = modules - sys.stdlib_module_names - {"oa_utils"}
    owners = metadata.packages_distributions()
    needed = {plain(owners[module][0]) for module in outside}
    unseen = {"gguf"}  # transformers imports it to read SmolLM2's file
    assert needed | unseen == {plain(r) for r in PROJECT["dependencies"]}


def test_the_lock_is_within_the_bounds_of_pyproject():
    pinned = dict(line.split("==") for line in LOCK)
    pinned = {plain(name): version for name, version in pinned.items()}
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    for text in PROJECT["dependencies"] + extras:
        requirement = Requirement(text)
        assert pinned[plain(requirement.name)] in requirement.specifier, text


def test_environment_yml_installs_the_lock():
    text = (ROOT / "environment.yml").read_text()
    assert "-r requirements.lock" in text
    assert "-e ." in text


def test_make_alone_lists_every_command():
    makefile = (ROOT / "Makefile").read_text()
    commands = set(re.search(r"\.PHONY: (.*)", makefile)[1].split())
    assert commands == set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.M))


def make_setup(folder: Path, *says: str) -> subprocess.CompletedProcess:
    """`make setup` in a folder, with a shell script for Python."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    write_script(folder / "python", *says)
    call = ["make", "setup", "PYTHON=./python"]
    return subprocess.run(call, cwd=folder, capture_output=True, text=True)


def write_script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


def test_an_old_python_is_refused_before_anything_is_made(tmp_path):
    done = make_setup(tmp_path, "exit 1")
    assert done.returncode
    assert "older than 3.11: name another one, such as PYTHON=python3.12" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_half_made_venv_is_made_anew(tmp_path):
    write_script(tmp_path / ".venv" / "bin" / "python", "exit 1")  # it has no pip
    done = make_setup(tmp_path, 'if [ "$2" = venv ]; then cp python .venv/bin/; echo "$@"; fi')
    assert "-m venv --clear .venv" in done.stdout
    assert (tmp_path / ".venv" / ".ready").exists(), done.stderr


def test_make_names_modules_that_exist():
    for module in re.findall(r"-m (oa_utils[\w.]*)", (ROOT / "Makefile").read_text()):
        assert importlib.util.find_spec(module), module


def test_the_wheel_has_every_package():
    packages = {".".join(p.parent.relative_to(ROOT).parts) for p in LIBRARY}
    assert packages | {"oa_utils.data"} == set(PYPROJECT["tool"]["setuptools"]["packages"])


INSTALLED = """
import sys
from pathlib import Path
import oa_utils as oa
from oa_utils import plots, store
from oa_utils.paper import claims

site, cache, experiment = sys.argv[1:]
assert Path(oa.__file__).is_relative_to(site), oa.__file__
assert store.repository() is None
assert store.folder() == Path(cache) / "optimal-ablation" / "store", store.folder()
assert plots.folder("default") == Path.cwd() / "figures"
model = oa.load_model("tiny")
assert len(oa.tasks.ioi(model, n=8)) == 8
assert len(oa.results("tiny", experiment))
assert claims.published("tiny")
assert not list(Path(site).rglob(".oa")), "results among the packages"
"""


def test_an_installed_wheel_works_from_any_folder(tmp_path):
    source = tmp_path / "source"
    for name in ("oa_utils", "data"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    shutil.rmtree(source)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    experiments = sorted((ROOT / "data" / "results" / "tiny").iterdir())
    experiment = next(path.name for path in experiments if path.name != "claims")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OA_")}
    environment |= {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run(
        [sys.executable, "-c", INSTALLED, site, tmp_path / "cache", experiment],
        cwd=elsewhere,
        env=environment,
        check=True,
    )


# ---- the tests check what they say


def test_calls_are_checked_against_their_shapes_and_types():
    """Without the hook of `conftest.py`, annotations would be words."""
    with pytest.raises(jaxtyping.TypeCheckError):
        stats.kl(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(jaxtyping.TypeCheckError):
        machine.duration("3")


def test_every_mutant_breaks_a_line_that_is_there_once():
    script = script_of("mutants")
    assert len({script.name_of(*mutant[:3]) for mutant in script.MUTANTS}) == len(script.MUTANTS)
    for file, old, new, tests in script.MUTANTS:
        text = (ROOT / "oa_utils" / file).read_text()
        assert text.count(old) == 1, (file, old)
        ast.parse(text.replace(old, new))
        assert all((ROOT / "tests" / name).exists() for name in tests.split()), tests


# ---- the rooms of the house


def test_the_method_never_imports_the_papers_bookkeeping():
    for path in METHOD:
        assert not [name for name in imports(path) if name.startswith("oa_utils.paper")], path


def test_only_models_imports_transformer_lens():
    importing = [p.name for p in LIBRARY if any("transformer_lens" in n for n in imports(p))]
    assert importing == ["models.py"]


@pytest.mark.parametrize("word", ["import pickle", '"cuda"', "'cuda'", "HookedTransformer("])
def test_the_library_does_not_say(word):
    assert not [p.name for p in LIBRARY if word in p.read_text()]


def test_library_code_does_not_print():
    for path in LIBRARY:
        for node in ast.parse(path.read_text()).body:
            if getattr(node, "name", "") == "main":
                continue
            calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
            assert not [f for f in calls if getattr(f, "id", "") == "print"], path.name


# ---- the public surface


def code_of(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_every_public_name_is_used_and_there_are_few():
    import oa_utils as oa

    assert 0 < len(oa.__all__) <= 35
    readme = (ROOT / "README.md").read_text()
    text = "\n".join([readme, *(source for path in NOTEBOOKS for source in code_of(path))])
    unused = [name for name in oa.__all__ if not re.search(rf"\boa\.{name}\b", text)]
    assert not unused
    assert all(hasattr(oa, name) for name in oa.__all__)


def public_functions() -> list:
    """What `oa_utils` exports, and the functions of the modules among it."""
    import oa_utils as oa

    exported = [getattr(oa, name) for name in oa.__all__]
    modules = [x for x in exported if isinstance(x, ModuleType)]
    inside = [
        function
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
    ]
    return [x for x in exported if callable(x)] + inside


ANY_NUMBER = {("bootstrap", "arrays")}  # samples whose rows are drawn together


def test_every_public_function_has_a_full_signature():
    assert public_functions()
    open_ended = {
        (function.__name__, name)
        for function in public_functions()
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    assert open_ended == ANY_NUMBER


# ---- notebooks


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request) -> Path:
    return request.param


def test_a_notebook_has_one_cell_of_parameters(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    tagged = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    source = "".join(tagged[0]["source"])
    brings_its_own_models = not any("load_model" in source for source in code_of(notebook))
    if not brings_its_own_models:
        assert 'MODEL = os.environ.get("OA_MODEL", "tiny")' in source
    assert 'BUDGET = os.environ.get("OA_BUDGET", "default")' in source


def test_a_notebooks_cells_are_short(notebook):
    for source in code_of(notebook):
        assert len(source.splitlines()) <= 25, source
        assert max(map(len, source.splitlines()), default=0) <= 100, source


NAME = r"(MODEL|model\.name)"
FORBIDDEN = {
    "a pandas Styler (random ids)": r"(?<!plots)\.style\b",
    "a write to os.environ": r"os\.environ(\[.*\]\s*=[^=]|\.(setdefault|update|pop))|putenv|%env",
    "the name of a model compared": rf"{NAME}\s*(==|!=|\bin\b)|(==|!=)\s*{NAME}",
    "settings frozen by hand": r"tuple\([^()]*\.items\(\)\)",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_notebook_holds(notebook, what):
    for source in code_of(notebook):
        assert not re.search(FORBIDDEN[what], source), source


def tables_of_budgets(source: str) -> list[ast.AST]:
    """Dictionaries whose keys are names of budgets: what `oa.choose` is for."""
    tree = ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.MULTILINE))
    tables = []
    for node in ast.walk(tree):
        keys = getattr(node, "keys", []) if isinstance(node, ast.Dict) else []
        names = {key.value for key in keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
            names = {keyword.arg for keyword in node.keywords}
        if len(names & set(machine.BUDGETS)) > 1:
            tables.append(node)
    return tables


def test_a_notebook_holds_no_table_of_budgets(notebook):
    for source in code_of(notebook):
        assert not tables_of_budgets(source), source


@pytest.mark.parametrize(
    ("source", "n"),
    [
        ('N = {"test": 1, "default": 2}[BUDGET]', 1),
        ('STEPS = {"ugs": {"default": 3, "paper": 4, **more}}', 1),
        ("%matplotlib inline\nN = dict(test=1, paper=2)", 1),
        ('parts = {"train": 1, "test": 2}', 0),
        ("N = oa.choose(model, test=1, small=2, default=3, paper=4)", 0),
    ],
)
def test_a_table_of_budgets_is_seen(source, n):
    assert len(tables_of_budgets(source)) == n


def test_no_output_has_random_ids(notebook):
    for cell in json.loads(notebook.read_text())["cells"]:
        assert '"T_' not in "".join(str(output) for output in cell.get("outputs", []))
