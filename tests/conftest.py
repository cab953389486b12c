"""Options and profiles: which implementation the laws judge, and how many cases they draw."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from oracle.contract import load
from oracle.suite import describe

# Cases drawn in all by the laws, for one model.
EXAMPLES = {"dev": 4_500, "ci": 4_500, "nightly": 40_000}

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=2000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--impl", default="impl:PaddingFree", help="the implementation the laws judge, package.module:Object"
    )
    parser.addoption("--profile", default="ci" if os.environ.get("CI") else "dev", choices=sorted(EXAMPLES))
    parser.addoption("--full", action="store_true", help="benchmarks: all workloads, all contenders")
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="benchmarks: where")
    parser.addoption("--seed", type=int, help="of the laws' drawn cases (default 0; nightly: the day's number)")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # with two OpenMP threads the tiny models run many times slower
    settings.load_profile(config.getoption("--profile"))
    transformers.logging.set_verbosity_error()


def pytest_report_header(config: pytest.Config) -> str:
    implementation = load(config.getoption("--impl"))
    named = f"implementation {describe(implementation)} ({config.getoption('--impl')})"
    libraries = f"torch {torch.__version__}; transformers {transformers.__version__}; device cpu"
    return f"{named}; {libraries}; profile {config.getoption('--profile')}; law seed {_seed(config)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(scope="session")
def implementation(request: pytest.FixtureRequest) -> Any:
    """The implementation under test."""
    return load(request.config.getoption("--impl"))


def _seed(config: pytest.Config) -> int:
    given = config.getoption("--seed")
    if given is not None:
        return int(given)
    return datetime.now(UTC).toordinal() if config.getoption("--profile") == "nightly" else 0


@pytest.fixture(scope="session")
def law_seed(request: pytest.FixtureRequest) -> int:
    """Reproduces the laws' draws."""
    return _seed(request.config)


@pytest.fixture(scope="session")
def law_database(request: pytest.FixtureRequest) -> ExampleDatabase | None:
    """Failing cases of earlier nights."""
    nightly = request.config.getoption("--profile") == "nightly"
    return DirectoryBasedExampleDatabase(".hypothesis/examples") if nightly else None


@pytest.fixture(scope="session")
def law_examples(request: pytest.FixtureRequest) -> int:
    """Cases the laws draw in all, for one model."""
    return EXAMPLES[request.config.getoption("--profile")]


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether benchmarks may take long."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where benchmarks run."""
    return str(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _global_random_state_is_left_alone() -> Iterator[None]:
    """Values come from local generators: nothing may touch the global one."""
    before = torch.random.get_rng_state()
    yield
    assert torch.equal(before, torch.random.get_rng_state()), "the test moved torch's global random state"
