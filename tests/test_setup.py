"""The files that set everything up say the same and nothing that holds on one machine only."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.lock").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def plain(name: str) -> str:
    return re.split(r"[<>=\[]", name)[0].lower().replace("_", "-")


def test_the_lock_is_plain_pins_only():
    assert len(LOCK) > 50
    for line in LOCK:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_the_lock_has_everything_that_pyproject_names():
    pinned = {plain(line) for line in LOCK}
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    assert {plain(r) for r in PROJECT["dependencies"] + extras} <= pinned


def test_environment_yml_installs_the_lock():
    text = (ROOT / "environment.yml").read_text()
    assert "-r requirements.lock" in text and "-e ." in text


def test_only_models_imports_transformer_lens():
    importing = re.compile(r"^\s*(from|import) transformer_lens", re.M)
    assert [p.name for p in (ROOT / "oa_utils").rglob("*.py") if importing.search(p.read_text())] == ["models.py"]


def test_no_file_of_the_library_is_longer_than_300_lines():
    sizes = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "oa_utils").rglob("*.py")}
    assert max(sizes.values()) <= 300, sizes


@pytest.mark.parametrize("word", ["import pickle", '"cuda"', "'cuda'", "HookedTransformer("])
def test_the_library_does_not_say(word):
    assert not [p.name for p in (ROOT / "oa_utils").rglob("*.py") if word in p.read_text()]


def test_library_code_does_not_print():
    for path in (ROOT / "oa_utils").rglob("*.py"):
        body = path.read_text().split('if __name__ == "__main__"')[0]
        found = re.search(r"^\s*print\(", body, re.M)
        assert not found or "def main" in body, path.name


def test_make_alone_lists_every_command():
    makefile = (ROOT / "Makefile").read_text()
    commands = set(re.search(r"\.PHONY: (.*)", makefile)[1].split())
    assert commands == set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.M))
