"""The README, tutorials and how-to pages as a reader runs them: pasted in order into a fresh process.

Once as written, and once as JAX comes, in float32: without the line that switches float64 on.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import dualfluence
from dualfluence.apps.cli._app import app
from journey_worker import BLOCK

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
WORKER = Path(__file__).parent / "journey_worker.py"
README = ROOT / "README.md"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
NEEDS_A_MODEL = {"adapters.md"}
"""Pages that begin with the reader's own model; `PREAMBLES` has one."""

OTHERS = [
    page
    for page in sorted([*DOCS.glob("*.md"), *(DOCS / "howto").glob("*.md")])
    if BLOCK.search(page.read_text()) and page.name not in NEEDS_A_MODEL
]
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")
DISTANCES = re.compile(r"(\S+): (\S+) from retraining, certified (\S+)")

pytestmark = pytest.mark.host


def journey(folder, page, bits, preamble="-", blocks=()):
    """What the page printed; a step that raises, or warns of what the page does not mention, fails."""
    arguments = [
        sys.executable,
        str(WORKER),
        str(page),
        str(bits),
        str(preamble),
        *map(str, blocks),
    ]
    path = os.pathsep.join(
        [str(Path(dualfluence.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        arguments,
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] is None
    assert found["blocks"] >= 1
    text = page.read_text()
    assert [w for w in found["warned"] if w.split(":")[0] not in text] == []
    return found["printed"]


@pytest.mark.parametrize("bits", [32, pytest.param(64, marks=pytest.mark.thorough)])
def test_the_readme(tmp_path, bits, monkeypatch):
    """It leaves JAX as it comes; a reader may have switched float64 on."""
    monkeypatch.setenv("JAX_ENABLE_X64", str(int(bits == 64)))
    printed = DISTANCES.findall(journey(tmp_path, README, bits))
    shown = DISTANCES.findall(README.read_text().split("prints")[1])
    assert len(printed) == len(shown) == 2
    for (name, off, bound), (same, *stated) in zip(printed, shown, strict=True):
        assert name == same
        assert float(off) <= float(bound)
        if bits == 32:  # float64 draws other random parameters
            assert [float(off), float(bound)] == pytest.approx([float(v) for v in stated], rel=0.06)
    assert float(printed[1][2]) <= 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("page", [*TUTORIALS, *OTHERS], ids=lambda page: page.name)
def test_a_page(tmp_path, page):
    """Both ways print the same lines, up to numbers, but for one: `verify` says that it cannot compute digits
    of a float64 kernel again in float32."""
    told = {}
    for bits in (64, 32):
        (tmp_path / str(bits)).mkdir()
        printed = journey(tmp_path / str(bits), page, bits).splitlines()
        told[bits] = [line for line in printed if not line.startswith("ON TRUST: the digits of K")]
    masked = [[NUMBER.sub("#", line) for line in told[bits]] for bits in (64, 32)]
    assert len(masked[0]) == len(masked[1])
    same = sum(one == other for one, other in zip(*masked, strict=True))
    assert same >= len(masked[0]) / 2
    for wide, narrow in zip(told[64], told[32], strict=True):
        one, other = (re.search(r"accuracy[^\d\n]*(0\.\d+)", line) for line in (wide, narrow))
        if one and other:
            assert float(one[1]) == pytest.approx(float(other[1]), abs=0.1), narrow


@pytest.mark.thorough
def test_sentences_that_taught_it_are_those_without_which_it_says_something_else(tmp_path):
    """Its numbers: parts of words sum to scores on the page, and retraining agrees with the ranking."""
    printed = journey(tmp_path, DOCS / "tutorials" / "sentences.md", 32)
    everyone = float(re.search(r"with all sentences: loss (\S+)", printed)[1])
    without = dict(re.findall(r"without the (.+): loss (\S+)", printed))
    losses = {name: float(loss) for name, loss in without.items()}
    assert losses["ten most helpful"] > max(
        everyone, losses["ten at random"], losses["ten with most words in common"]
    )
    assert losses["ten most helpful"] > 1.5 * losses["ten at random"]
    page = (tmp_path / "sentences.html").read_text()
    first = re.search(r"^helpful\n +(\S+) ", printed, re.MULTILINE)[1]
    shown = re.search(r'<div class="good">.*?<span>([+-]\d\S*)</span>', page)[1]
    assert float(shown) == pytest.approx(float(first), abs=0.006)
    item = page.split('<div class="good">')[1].split("</li>")[0]
    parts = [float(v) for v in re.findall(r'<mark title="(\S+)"', item)]
    assert sum(parts) == pytest.approx(float(shown), rel=0.02)


POINTS = """
import jax, numpy as np
rng = np.random.default_rng(0)
x, y = rng.normal(size=(30, 4)).astype("float32"), rng.integers(0, 3, 30)
xq, yq = x[:2], y[:2]
"""
PREAMBLES = {
    (1, 3): (
        "flax",
        """
from flax import nnx
model, schedule = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), lambda step: 0.1
checkpoints = [nnx.Linear(4, 3, rngs=nnx.Rngs(seed)) for seed in range(3)]
""",
    ),
    (2,): (
        "torchax",
        """
import torch
import dualfluence as dfl
model, weight_decay = torch.nn.Linear(4, 3), 1e-2
optimiser = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=weight_decay)
points, labels = torch.from_numpy(x), torch.from_numpy(y)
for _ in range(1000):
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(model(points), labels).backward()
    optimiser.step()
""",
    ),
    (4,): (
        "optax",
        """
import dualfluence as dfl, jax.numpy as jnp, optax
schedule, params = lambda step: 0.1, {"w": jnp.ones((4, 3)) / 4}
network = lambda params, x: x @ params["w"]
optimizer, opt_states, checkpoints = optax.adamw(schedule), [], []
state = optimizer.init(params)
for _ in range(3):
    gradient = jax.grad(lambda p: jnp.mean(network(p, x) ** 2))(params)
    update, state = optimizer.update(gradient, state, params)
    params = optax.apply_updates(params, update)
    opt_states.append(state)
    checkpoints.append(params)
""",
    ),
    (5,): (
        "transformers",
        """
import copy, torch, dualfluence as dfl
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
class tokenizer: decode = staticmethod(lambda ids: f" {ids[0]}")
torch.manual_seed(0)
folder, names = "tiny", None
sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=19, max_position_embeddings=6, **sizes)).save_pretrained(folder)
dataset = [{"input_ids": row} for row in rng.integers(3, 19, (6, 6)).tolist()]
prompts_with_answers = dataset[:2]
learner = AutoModelForCausalLM.from_pretrained(folder).train()
optimizer, saved_models, states = torch.optim.AdamW(learner.parameters(), lr=1e-2), [], []
names = [name for name, _ in learner.named_parameters()]
ids = torch.tensor([row["input_ids"] for row in dataset])
for _ in range(2):
    optimizer.zero_grad()
    learner(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    learner.save_pretrained("step")
    saved_models.append(AutoModelForCausalLM.from_pretrained("step"))
    states.append(copy.deepcopy(optimizer.state_dict()))
""",
    ),
    (6,): (
        "sklearn",
        """
import dualfluence as dfl
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
X, y = x, (y > 0).astype(int)
X_test, y_test = xq, (yq > 0).astype(int)
""",
    ),
    (7,): ("sklearn", "import dualfluence as dfl\nX, X_test, y_test = x, xq, yq\n"),
}


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param((1, 3), marks=pytest.mark.thorough),
        pytest.param((2,), marks=pytest.mark.frameworks),
        pytest.param((4,), marks=pytest.mark.thorough),
        pytest.param((5,), marks=pytest.mark.frameworks),
        pytest.param((6,), marks=pytest.mark.frameworks),
        pytest.param((7,), marks=pytest.mark.frameworks),
    ],
    ids=[
        "flax",
        "torch",
        "AdamW",
        "Hugging Face",
        "scikit-learn taken over",
        "scikit-learn estimators",
    ],
)
def test_models_of_other_frameworks(tmp_path, blocks):
    """The page leaves JAX as it comes."""
    package, text = PREAMBLES[blocks]
    pytest.importorskip(package)
    (tmp_path / "preamble.py").write_text(POINTS + text)
    journey(tmp_path, DOCS / "adapters.md", 32, tmp_path / "preamble.py", blocks)


def test_every_block_of_the_adapters_has_a_journey():
    blocks = BLOCK.findall((DOCS / "adapters.md").read_text())
    assert sorted(k for chosen in PREAMBLES for k in chosen) == list(range(1, len(blocks) + 1))


# Commands that pages show.

PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
SHELL = re.compile(r"^```(?:|sh|shell|bash|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:dualfluence|make) [^`]+)`")
AFTER = re.compile(r"`((?:fig\d|linear) --[^`]+)`")
"""Of docs/results/README.md, whose table leaves out the first two words."""


def command_lines(start):
    """`(page, line)` for everything shown that begins with this word."""
    for page in PAGES:
        text = page.read_text()
        blocks = [block.replace("\\\n", " ") for block in SHELL.findall(text)]
        shown = [line for block in blocks for line in block.splitlines()]
        shown += INLINE.findall(text)
        if page.parent.name == "results":
            shown += [f"dualfluence reproduce {rest}" for rest in AFTER.findall(text)]
        for line in shown:
            line = line.split("#")[0].strip().removeprefix("$ ")
            if line.startswith(f"{start} "):
                yield page.relative_to(ROOT).as_posix(), line


def parse(line):
    """Click's reading of a command line, without running it; names of files and the like may be anything."""
    words = [
        w for w in shlex.split(line.split("|")[0])[1:] if not re.fullmatch(r"\[?…\]?|\.\.\.", w)
    ]
    command, name = typer.main.get_command(app), "dualfluence"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{name} has no command {words[0]!r}"
        name = f"{name} {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    options = {o: p for p in command.params for o in p.opts + p.secondary_opts if o.startswith("-")}
    given = [word.split("=")[0] for word in words if word.startswith("-")]
    return name, [option for option in given if option not in options]


def test_the_commands_of_the_pages_exist():
    lines = list(command_lines("dualfluence"))
    assert len(lines) >= 15
    assert len({page for page, _ in lines}) >= 6
    unknown = [(page, line, parse(line)[1]) for page, line in lines]
    assert [found for found in unknown if found[2]] == []


def test_a_renamed_option_or_command_is_seen():
    assert parse("dualfluence explore --save page.html") == ("dualfluence explore", [])
    assert parse("dualfluence explore --store page.html")[1] == ["--store"]
    with pytest.raises(AssertionError, match="no command 'explain'"):
        parse("dualfluence explain")


def test_the_targets_of_the_pages_are_in_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = list(command_lines("make"))
    assert len(lines) >= 5
    wanted = {word for _, line in lines for word in line.split()[1:2]}
    assert sorted(wanted - targets) == []
