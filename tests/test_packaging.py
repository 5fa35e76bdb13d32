"""The wheel holds everything, and works outside the checkout."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a new environment that holds the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: setuptools leaves a build folder in the tree
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "results", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    return python


def test_every_recipe_builds_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "import zoo, pathlib\n"
        "print(pathlib.Path(zoo.__file__).parent)\n"
        "for name in zoo.list(kind='recipe'): print(name, zoo.build(name, device='meta').config.num_params)\n"
    )
    # Torch and the like come from this environment; PYTHONPATH does not read its .pth files, so the checkout stays out.
    environment = {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(
        [str(installed), "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    where, *built = done.stdout.splitlines()
    assert Path(where).is_relative_to(installed.parent.parent)
    assert len(built) == len(list((ROOT / "zoo" / "recipes").glob("*.yaml")))
    command = [str(installed.parent / "zoo"), "list", "--kind", "mixer"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert "delta_net" in shown


def test_no_top_level_package_but_zoo(installed: Path) -> None:
    """A top-level ``kernels`` would hide the package of that name that transformers imports."""
    (site,) = installed.parent.parent.glob("lib/python*/site-packages")
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"zoo"}
