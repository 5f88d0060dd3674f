"""Finds everything that is wrong with a run before it starts. `asyncrl run` refuses it, `asyncrl doctor` prints it."""

import resource
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from asyncrl.algorithms.algorithm_by_name import algorithm_problems
from asyncrl.children.containment import Containment, Surroundings, WithoutNetwork, try_containment
from asyncrl.children.sandbox import SandboxError
from asyncrl.config.install_hints import missing_packages
from asyncrl.config.named_files import is_of_gymnasium
from asyncrl.config.placement import pool_key, pool_names, pools_of
from asyncrl.config.problems import Problem, refuse
from asyncrl.config.schema import Config
from asyncrl.config.sections.runtime_config import FeedbackConfig
from asyncrl.config.user_code import resolve, source_problem
from asyncrl.controller.controller import Algorithm
from asyncrl.controller.training_run import OnStep
from asyncrl.deploy.checks.machine import (
    available_memory,
    device_mistakes,
    free_shared_memory,
    gpu_package_problems,
    size_text,
)
from asyncrl.deploy.checks.memory_needs import SharedMemoryNeed, longest_token_of, memory_problems, shared_memory
from asyncrl.deploy.checks.model_checks import (
    adapter_problems,
    cache_problems,
    content_problems,
    here,
    transport_problems,
    unreachable_models,
)
from asyncrl.deploy.checks.run_prompts import measured_lengths, prompt_tokenizer
from asyncrl.deploy.join_address import listen_address, refuse_missing_keys
from asyncrl.deploy.process.local_launcher import needed_descriptors
from asyncrl.deploy.service_specs import device_of, service_specs, worker_count
from asyncrl.engines.generation.vllm.option_problems import vllm_problems
from asyncrl.engines.models.model_families import family_problems, rotation_by_longest_row
from asyncrl.engines.models.model_folder import context_of_folder, damages, has_chat_template
from asyncrl.engines.models.model_preparation import name_problems
from asyncrl.engines.models.model_shape import shape_of
from asyncrl.engines.models.scoring_models import scoring_model_folders, scoring_model_problems
from asyncrl.engines.models.warmed_model_cache import CONTEXT
from asyncrl.engines.ranks.rank_limits import models_of_services, rank_problems
from asyncrl.environments.loading import EnvironmentSpec, environment_problems
from asyncrl.errors import ConfigError
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.rewards.functions import function_problems, function_specs
from asyncrl.rewards.templates import pass_problems
from asyncrl.tasks.source_problems import prompt_problems
from asyncrl.tasks.turn_template import turn_problems
from asyncrl.telemetry.sinks import scrape_problems, sink_problems

# Finds the function of the user that is called with the metrics of each step.


ON_STEP = "telemetry.on_step"


def callback_problems(config: Config) -> Iterator[Problem]:
    """Yields why the function cannot be found, as far as its source shows it."""
    if config.telemetry.on_step and (problem := source_problem(config.telemetry.on_step, ON_STEP)) is not None:
        yield problem


def step_callback(config: Config) -> OnStep | None:
    """Returns the function of the config, if it names one. Raises ConfigError for what is none, and errors of the
    user's file as they are."""
    if not config.telemetry.on_step:
        return None
    function: OnStep = resolve(config.telemetry.on_step, ON_STEP)
    refuse_no_callback(function, f"{ON_STEP}: {config.telemetry.on_step}")
    return function


def refuse_no_callback(function: Any, named: str) -> None:
    """Raises ConfigError, which begins with `named`, for what is no plain function."""
    if not callable(function) or iscoroutinefunction(function):
        raise ConfigError(f"{named}: write a plain function of a dict of metrics that returns whether to end")


# Checks whether code of the user can be contained here, where an experiment runs any.


SYSTEM = ("/dev", "/proc", "/sys")


def code_of_user(config: Config, served: Collection[str] = ()) -> list[str]:
    """Returns the names of reward functions and environments that are no part of asyncrl and run on this host. served:
    services that the caller brings."""
    elsewhere = {*served, *config.fleet.joined}
    environment = EnvironmentSpec(config.environment.use, config.environment.options)
    is_here = environment.use and environment.is_users and "environment" not in elsewhere
    names = [environment.use] if is_here else []
    for service in config.scorers:
        try:
            specs = [] if service in elsewhere else function_specs(config, service)
        except ConfigError:  # `function_problems` reports it.
            continue
        names += [spec.use for spec in specs if spec.is_users]
    return names


def containment_problems(config: Config, served: Collection[str] = ()) -> Iterator[Problem]:
    """Yields why code of the user cannot be contained on this machine."""
    section = config.children
    if section.sandbox == "none" or not code_of_user(config, served):
        return
    for folder in section.writable:
        real = Path(folder).resolve()
        if not real.is_dir():
            yield Problem("children.writable", "", f"there is no folder {folder}; make it, or take it off the list")
        elif real == Path("/") or any(real.is_relative_to(system) for system in SYSTEM):
            text = f"{folder} has more than files, the processes of the fleet among it; name folders of your own"
            yield Problem("children.writable", "", text)
            return
    try:
        try_containment(*_layers(config))
    except SandboxError as error:
        yield Problem("children.sandbox", "", str(error))


def _layers(config: Config) -> list[Surroundings]:
    """Returns what contains code of the user, the outer layer first: agents and their child share one network."""
    section = config.children
    inner = Containment(writable=section.writable, network=section.network)
    of_agents = EnvironmentSpec(config.environment.use).is_of_agents
    return [WithoutNetwork(), inner] if of_agents and not section.network else [inner]


def preflight(
    config: Config,
    *,
    places: Mapping[str, str] | None = None,
    algorithm: Algorithm | None = None,
    served: Collection[str] = (),
    model_is_made: bool = False,
) -> Iterator[Problem]:
    """Yields every problem of a run that is known without running the user's code, warnings among them.

    places: where the value of each key comes from, e.g. "mine.toml:12". algorithm: given as an object instead of
    `algorithm.custom`. served: names of services that the caller brings. model_is_made: the run directory has the model
    already.
    """
    for problem in _problems(config, algorithm, served, model_is_made):
        yield replace(problem, where=problem.where or (places or {}).get(problem.key, ""))


def _problems(
    config: Config, algorithm: Algorithm | None, served: Collection[str], model_is_made: bool
) -> Iterator[Problem]:
    yield from config.warnings
    yield from transport_problems(config)
    yield from _descriptor_problems(worker_count(config))
    if config.acting.env:
        yield from _acting_problems(config)
        return
    named = [] if model_is_made else list(name_problems(config.model.name))
    damaged = [] if model_is_made else list(_damages(config))
    scoring = () if damaged else scoring_model_problems(config, here(config.model))
    named += (each for each in scoring if each.key.partition(".")[0] not in served)
    yield from named
    yield from damaged or model_problems(config, here(config.model))
    missing = () if model_is_made else unreachable_models(_models(config))
    yield from (each for each in missing if each.key not in {problem.key for problem in named})
    yield from vllm_problems(config)
    yield from sink_problems(config.telemetry.sinks)
    yield from callback_problems(config)
    yield from scrape_problems(config.telemetry)
    yield from prompt_problems(config)
    yield from missing_devices(config)
    yield from gpu_package_problems(devices(config))
    yield from scoring_problems(config, served)
    yield from _feedback_host_problems(config.feedback)
    yield from environment_problems(config)
    yield from containment_problems(config, served)
    yield from algorithm_problems(config, algorithm)
    yield from missing_packages(config, model_is_made=model_is_made)
    yield from _listening_problems(config)


def _listening_problems(config: Config) -> Iterator[Problem]:
    """Yields why workers of other hosts could not join."""
    if config.fleet.listen:
        try:
            listen_address(config)
            refuse_missing_keys(config)
        except ConfigError as error:
            yield Problem.of_error(error, str(error).partition(":")[0])


def _acting_problems(config: Config) -> Iterator[Problem]:
    """Yields the problems of a policy that acts: it has no model, prompts or rewards of its own."""
    yield from sink_problems(config.telemetry.sinks)
    yield from scrape_problems(config.telemetry)
    if not is_of_gymnasium(config.acting.env):
        problem = source_problem(config.acting.env, "acting.env")
        yield from [problem] if problem is not None else []
    yield from containment_problems(config, ())
    yield from missing_packages(config, model_is_made=True)
    yield from _listening_problems(config)


def missing_devices(config: Config, services: Collection[str] = ()) -> Iterator[Problem]:
    """Yields the devices that this machine does not have, with the services that are to run there. services: those that
    are started; empty: all."""
    found = {key: at for key, at in devices(config).items() if not services or key.partition(".")[0] in services}
    return (_named_by_pool(problem, config) for problem in device_mistakes(found))


def devices(config: Config) -> dict[str, str]:
    """Returns the devices of this host that services with torch compute on, by config key; those of a pool once."""
    pools = pools_of(config)
    names = pool_names(config)
    found: dict[str, str] = {}
    for spec in service_specs(config):
        pool = pools.get(names.get(spec.name, ""))
        if spec.origin == "plain" or spec.name in config.fleet.joined:  # A host that joins says which devices it has.
            continue
        if pool is not None:
            found |= {f"pools.{pool.name}.devices[{at}]": device for at, device in enumerate(pool.devices)}
        elif spec.name != "evaluation":
            found[f"{spec.name}.device"] = device_of(config, spec)
    return found


def _named_by_pool(problem: Problem, config: Config) -> Problem:
    """Returns the problem of a device with the services of its pool, if it is of one."""
    section, _, rest = problem.key.partition(".")
    if section != "pools":
        return problem
    pool = rest.rpartition(".devices")[0]
    users = tuple(pool_key(service) for service, name in pool_names(config).items() if name == pool)
    return replace(problem, others=users)


def scoring_problems(config: Config, served: Collection[str] = ()) -> Iterator[Problem]:
    """Yields the problems of reward and cost functions."""
    for service in config.scorers:
        if service not in served:
            yield from function_problems(config, service)
    if "reward" not in served:
        yield from pass_problems(config)


def _feedback_host_problems(section: FeedbackConfig) -> Iterator[Problem]:
    """Yields a problem when this machine does not have the address at which the page shall be served."""
    if section.asks:
        try:
            bound_socket(section.host, 0, "feedback.host").close()
        except ConfigError as error:
            yield Problem.of_error(error, "feedback.host")


def model_problems(config: Config, model: Path) -> Iterator[Problem]:
    """Yields the problems of family, layouts, memory, adapters and context window; a model that is not on this machine
    has none yet."""
    families = list(family_problems(config, model))
    yield from families
    if families:
        return  # Nothing below knows what such a folder should hold.
    yield from rank_problems(config, models_of_services(config, str(model)))
    yield from content_problems(model, config.generation.stop)
    yield from adapter_problems(config, str(model))
    yield from cache_problems(config, str(model))
    yield from memory_of_run(config, str(model))
    yield from _context_problems(config, model)
    if has_chat_template(model):
        yield from turn_problems(config, lambda: prompt_tokenizer(config, model).render_chat)


def scoring_folders(config: Config, policy: Path, noted: Path | None = None) -> dict[str, Path]:
    """Returns the folders of `scoring_model_folders`, and raises ConfigError as it does, and where the ranks of a
    service cannot share out a model, which may have been downloaded just now."""
    found = scoring_model_folders(config, policy, noted)
    refuse(rank_problems(config, {service: str(folder) for service, folder in found.items()}))
    return found


def _damages(config: Config) -> Iterator[Problem]:
    """Yields a problem for each file of a model folder that is incomplete."""
    for key, (name, _) in _models(config).items():
        for damage in damages(Path(name).expanduser()):
            yield Problem(key, "", f"{damage}; copy or download the model once more")


def _models(config: Config) -> dict[str, tuple[str, str]]:
    """Returns name and revision of each model, by key."""
    scorers = {each: getattr(config, each).model for each in ("critic", "reward", "cost", "cost_critic")}
    others = {f"{service}.model": (name, "") for service, name in scorers.items() if name}
    return {"model.name": (config.model.name, config.model.revision), **others}


def memory_of_run(config: Config, model: str) -> Iterator[Problem]:
    """Yields what does not fit into the memory of its device, or into shared memory."""
    if (shape := shape_of(model)) is not None:
        yield from memory_problems(config, shape, available_memory())
    yield from _shared_memory_problems(config, model)


def _shared_memory_need(config: Config, model: str) -> SharedMemoryNeed:
    """Returns the need of the longest rows that the config allows; where those do not fit, prompts are counted."""
    if (shape := shape_of(model)) is None:
        return SharedMemoryNeed(0, 0, 0)
    longest_token = longest_token_of(model)
    need = shared_memory(config, shape, longest_token)
    if need.weights + need.worst_rows <= free_shared_memory():
        return need
    return shared_memory(config, shape, longest_token, measured_lengths(config, model))


def rows_fit(config: Config, model: Path) -> bool:
    """Returns whether shared memory has room for the weights and for the rows of all samples in flight."""
    need = _shared_memory_need(config, str(model))
    return need.weights + need.rows <= free_shared_memory()


def _shared_memory_problems(config: Config, model: str) -> Iterator[Problem]:
    """Yields a problem when the weights do not fit into shared memory, and a warning when rows may not."""
    need = _shared_memory_need(config, model)
    free = free_shared_memory()
    found = f"{size_text(free)} of shared memory (/dev/shm) are free, and"
    remedy = "give it more (docker: --shm-size, compose: shm_size), or lower generation.max_new_tokens, staleness.limit"
    if need.weights > free:
        text = f"{found} two versions of the weights take {size_text(need.weights)}: {remedy} or the size of the model"
        yield Problem("", "", text)
    elif need.weights + need.rows > free:
        sizes = f"{size_text(need.weights)}, rows up to {size_text(need.rows)}"
        text = f"{found} weights take {sizes}: rows are sent as frames, which is slower; {remedy}"
        yield Problem("", "", text, is_warning=True)
    elif need.weights + need.worst_rows > free:
        sizes = f"{size_text(need.weights)}, rows up to {size_text(need.rows)} with usual text and"
        worst = f"{size_text(need.worst_rows)} if every token were the longest one, which would end the run"
        yield Problem("", "", f"{found} weights take {sizes} {worst}; {remedy}", is_warning=True)


def _context_problems(config: Config, folder: Path) -> Iterator[Problem]:
    """Yields problems of rows that are too long for the model, the longest answer without any prompt among them."""
    is_to_be_made = config.model.name.startswith("warmed:") and not folder.is_dir()
    context = CONTEXT if is_to_be_made else context_of_folder(folder)
    answer = config.response_tokens
    if context is not None and answer >= context:
        text = (
            f"{answer} new tokens leave no room for a prompt: {config.model.name} was made for {context} positions "
            f"(max_position_embeddings in its config.json); write fewer than {context}"
        )
        yield Problem("environment.max_tokens" if config.environment.use else "generation.max_new_tokens", "", text)
    if found := rotation_by_longest_row(folder, config):
        yield Problem("model.name", "", found)


def _descriptor_problems(workers: int) -> Iterator[Problem]:
    """Yields a problem when this user may not open as many files as a fleet of so many workers needs."""
    needed = needed_descriptors(workers)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = (
            f"a fleet of {workers} workers needs up to {needed} file descriptors a process, and this user may have "
            f"{hard}: raise the limit, `ulimit -n {needed}` or in /etc/security/limits.conf, or use fewer replicas"
        )
        yield Problem("", "", text)
