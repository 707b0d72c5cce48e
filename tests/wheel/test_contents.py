"""What the distributions contain, and what their page on an index says."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string

import pytest

from flyspec.version import __version__
from tests.wheel.user import ROOT, run

PACKAGES = {"flyspec", "draft_service", "verify_service", "orchestrator"}
TREE = "https://github.com/flyspec/flyspec"
MAX_WHEEL_BYTES = 40e6


@pytest.fixture(scope="module")
def names(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        return wheel.namelist()


@pytest.fixture(scope="module")
def metadata(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_string(wheel.read(name).decode())


def test_four_packages_and_nothing_else(names):
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith((".dist-info", ".libs"))} == PACKAGES
    for package in PACKAGES:
        assert f"{package}/py.typed" in names


def test_the_laboratory_is_a_distribution_of_its_own(laboratory):
    with zipfile.ZipFile(laboratory) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (about,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(wheel.read(about).decode())
    tracked = run("git", "ls-files", "flyspec_lab", cwd=ROOT / "lab").splitlines()
    assert names == set(tracked)
    assert metadata["Version"] == __version__
    assert f"flyspec=={__version__}" in metadata.get_all("Requires-Dist")


def test_the_packages_files_and_no_others(names):
    """Apart from the links in flyspec/bundled, and what the native step is compiled from."""
    tracked = run("git", "ls-files", *PACKAGES, cwd=ROOT).splitlines()
    here = {name for name in tracked if not (ROOT / name).is_symlink()}
    here = {name for name in here if not name.endswith((".cpp", ".h"))}
    packed = {name for name in names if name.split("/")[0] in PACKAGES}
    packed = {name for name in packed if not name.startswith("flyspec/bundled/")}
    native = {name for name in packed if name.endswith(".so")}
    assert packed - native == here - {"flyspec/bundled/__init__.py"}


@pytest.mark.parametrize(
    ("inside", "source"),
    [("models", "demo/models"), ("protos/flyspec/v1", "protos/flyspec/v1")],
)
def test_bundled_files_are_those_of_the_checkout(distributions, names, inside, source):
    inside = f"flyspec/bundled/{inside}/"
    files = {str(p.relative_to(ROOT / source)): p
             for p in (ROOT / source).rglob("*") if p.is_file()}  # fmt: skip
    assert {n.removeprefix(inside) for n in names if n.startswith(inside)} == set(files)
    with zipfile.ZipFile(distributions[1]) as wheel:
        for name, path in files.items():
            assert wheel.read(inside + name) == path.read_bytes(), name


def test_the_wheel_is_of_a_size_to_download(distributions):
    assert distributions[1].stat().st_size < MAX_WHEEL_BYTES


def test_the_sdist_has_what_the_wheel_is_built_from(distributions):
    with tarfile.open(distributions[0]) as sdist:
        tops = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
        assert not any(member.issym() for member in sdist.getmembers())
    assert PACKAGES | {"LICENSE", "CHANGELOG.md", "README.md", "pyproject.toml"} <= tops
    assert not tops & {"bench", "demo", "docs", "examples", "loadtest", "tests"}


def test_metadata(metadata, tools, distributions, folder):
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert metadata["Author"] == "The flyspec developers"
    assert metadata.get_all("Classifier")
    assert {url.split(", ")[1].startswith(TREE) for url in metadata.get_all("Project-URL")} == {
        True
    }
    run(tools / "twine", "check", "--strict", *distributions, cwd=folder)


def test_links_of_the_description_work_on_an_index(metadata):
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r' (?:src|href|srcset)="([^"]+)', text)
    assert links
    for link in links:
        assert re.match(r"https?://", link), link
        found = re.match(
            rf"({TREE}/(?:blob|tree)/main|https://raw.githubusercontent.com/flyspec/flyspec/main)/"
            r"([^#?]*)", link,
        )  # fmt: skip
        if found:
            assert (ROOT / found[2]).exists(), link
        else:
            assert not link.startswith(f"{TREE}/"), link


def test_all_is_every_extra_that_is_not_for_a_checkout(metadata):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (brought,) = extras["all"]
    left_out = {"demo", "all", "audit", "dev", "loadtest", "llama-cpp"}  # the last one is compiled
    assert set(re.findall(r"\w+", brought)[1:]) == set(extras) - left_out


def test_stubs_can_be_made_from_its_protos(installed, folder):
    where = run(
        installed / "python", "-c", "from flyspec.bundled import PROTOS; print(PROTOS)", cwd=folder
    ).strip()
    assert where.startswith(str(folder))
    (folder / "stubs").mkdir()
    run(sys.executable, "-m", "grpc_tools.protoc", "-I", where, "--python_out=stubs",
        "flyspec/v1/generation.proto", cwd=folder)  # fmt: skip
    assert (folder / "stubs/flyspec/v1/generation_pb2.py").is_file()
