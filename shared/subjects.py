"""Every subject, stream and bucket name of the installation, built in one place.

All stand below one prefix, so that several installations can share a broker. Nothing else
in the project may spell a subject.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import check_token

ENVIRONMENT = "@"
"""First character of the name of a shard that is an environment; its path follows."""


@dataclass(frozen=True, slots=True)
class Subjects:
    """Builds subjects below ``prefix`` (one token)."""

    prefix: str = "populace"

    def __post_init__(self) -> None:
        check_token(self.prefix, "the subject prefix")

    # Scenarios
    @property
    def scenario_submit(self) -> str:
        """Request: a scenario; the reply holds the run's name. Not captured by a stream."""
        return f"{self.prefix}.scenario.submit"

    @property
    def scenario_event(self) -> str:
        """Publish only: a scenario, kept by a stream even while no director is up."""
        return f"{self.prefix}.scenario.event"

    # Runs
    @staticmethod
    def scope(run: str, life: int) -> str:
        """What a run's processes call one another under: each life of it has its own.

        A run that is taken up again after a crash begins another life; whatever is left of an
        earlier one talks to nobody.
        """
        return run if life <= 1 else f"{run}~{life}"

    @staticmethod
    def life_of(scope: str) -> tuple[str, int]:
        """The run, and which life of it, that a scope is of."""
        run, _, life = scope.partition("~")
        return run, int(life) if life else 1

    @property
    def run_manage(self) -> str:
        """Request to any director: resume a run, or end one that nobody plays."""
        return f"{self.prefix}.runs.manage"

    def run_control(self, run: str) -> str:
        """Request: a control message (cancel, pause) to the director that plays the run."""
        return f"{self.prefix}.run.{run}.control"

    def run_status(self, run: str = "*") -> str:
        """JSON events: accepted, started, rounds, paused, ended, recorded. In a stream."""
        return f"{self.prefix}.run.{run}.status"

    def run_results(self, run: str, round_number: int | str = "*") -> str:
        """Batches of records of one round. Captured by a stream."""
        return f"{self.prefix}.run.{run}.results.{round_number}"

    def run_messages(self, run: str, round_number: int | str = "*") -> str:
        """Batches of what agents said to one another, of runs that record it. In a stream."""
        return f"{self.prefix}.run.{run}.messages.{round_number}"

    def run_call(self, scope: str, shard: str) -> str:
        """Batches of calls to the agents of one shard, or to one environment (``@path``)."""
        if shard[0] == ENVIRONMENT:
            return f"{self.prefix}.env.{scope}.call.{shard[1:]}"
        return f"{self.prefix}.run.{scope}.call.{shard}"

    def run_workers(self, scope: str) -> str:
        """What happens to the workers of a run: one of them ended."""
        return f"{self.prefix}.run.{scope}.workers"

    def run_lost(self, scope: str) -> str:
        """From the owner to all workers of a run: shards whose worker is gone."""
        return f"{self.prefix}.run.{scope}.lost"

    def run_state(self, run: str = "*", round_number: int | str = "*", part: str = ">") -> str:
        """What a run's processes held at the end of a round, in pieces. Captured by a stream.

        Parts are shards, environments (``@path``), the owner, and ``commit``, which says that a
        round's state is whole.
        """
        return f"{self.prefix}.state.{run}.{round_number}.{part}"

    def run_owner(self, run: str, verb: str) -> str:
        """Request to the process that owns a run's world: environment, listen, unlisten."""
        return f"{self.prefix}.run.{run}.owner.{verb}"

    # Environments
    def env_event(self, run: str, name: str, path: str) -> str:
        """What happened in an environment. ``*`` and ``>`` as usual. Captured by a stream."""
        return f"{self.prefix}.env.{run}.event.{name}.{path}"

    def env_matched(self, run: str, rule: str) -> str:
        """Events for one listener whose condition the environment itself evaluates."""
        return f"{self.prefix}.env.{run}.matched.{rule}"

    def env_journal(self, run: str, path: str) -> str:
        """What was done to an environment, in order. Captured by a stream."""
        return f"{self.prefix}.env.{run}.journal.{path}"

    def run_finished(self, run: str, round_number: int | str = "*", shard: str = ">") -> str:
        """Calls that a shard's agents have finished in a round. In the stream of states."""
        return f"{self.prefix}.state.{run}.{round_number}.finished.{shard}"

    @staticmethod
    def listener(run: str, life: int | None = None, name: str = "") -> str:
        """A durable listener's place in the stream of events; without a name, how they begin.

        Without a life, those of all lives.
        """
        return f"{run}~" if life is None else f"{run}~{life}~{name}"

    # Processes
    def inbox(self, process: str, box: str) -> str:
        """Where a process receives answers; one box per purpose."""
        return f"{self.prefix}.inbox.{process}.{box}"

    def inbox_prefix(self, process: str) -> str:
        """Below this, the NATS client makes the reply subjects of its plain requests."""
        return f"{self.prefix}.inbox.{process}.req"

    def host(self, host: str, verb: str) -> str:
        """Control requests to one host: acquire and release workers."""
        return f"{self.prefix}.host.{host}.{verb}"

    def worker(self, worker: str, verb: str) -> str:
        """Control requests to one worker: open a shard, count agents."""
        return f"{self.prefix}.worker.{worker}.{verb}"

    @staticmethod
    def service_ping(name: str) -> str:
        """NATS's own service protocol: every instance of the service answers."""
        return f"$SRV.PING.{name}"

    @staticmethod
    def service_stats(name: str) -> str:
        """The same: what every instance counts."""
        return f"$SRV.STATS.{name}"

    def service_state(self, process: str) -> str:
        """Request: what one service counts, as JSON."""
        return f"{self.prefix}.service.{process}.state"

    # Models
    def model_queue(self, pool: str = "*", run: str = "*") -> str:
        """The work queue of a pool of equal model endpoints. Captured by a stream."""
        return f"{self.prefix}.model.{pool}.{run}"

    @property
    def model_check(self) -> str:
        """Request: can this model be reached? Not captured by a stream."""
        return f"{self.prefix}.models.check"

    @property
    def model_last(self) -> str:
        """Publish: a run asks nothing more; each model service says when it has nothing of it."""
        return f"{self.prefix}.models.last"

    @property
    def model_held(self) -> str:
        """Request: does another model service have this message of prompts in hand?"""
        return f"{self.prefix}.models.held"

    @property
    def model_gone(self) -> str:
        """Publish: nobody waits for the answers to these prompts any more."""
        return f"{self.prefix}.models.gone"

    def model_kept(self, run: str = "*", round_number: int | str = "*") -> str:
        """Models' answers, and what was asked, of one round of a run. Captured by a stream."""
        return f"{self.prefix}.kept.{run}.{round_number}"

    def run_of_kept(self, subject: str) -> str:
        """The run in a subject of ``model_kept``."""
        return subject.removeprefix(f"{self.prefix}.kept.").partition(".")[0]

    def model_cache(self, key: str = "*") -> str:
        """An answer by what was asked, for other runs. Captured by a stream."""
        return f"{self.prefix}.cache.{key}"

    # Personas
    def persona(self, verb: str) -> str:
        """Requests to the persona services: sample, fit, enrich, job. Not captured by a stream."""
        return f"{self.prefix}.persona.{verb}"

    def persona_job(self, job: str = "*") -> str:
        """The queue of populations to be written, an entry each. Captured by a stream."""
        return f"{self.prefix}.personas.job.{job}"

    def persona_part(self, job: str = "*", generation: str = "*", part: str = "*") -> str:
        """The queue of people to be written, a few in an entry. Captured by a stream."""
        return f"{self.prefix}.personas.part.{job}.{generation}.{part}"

    def persona_written(self, job: str = "*", row: int | str = "*", turn: int | str = "*") -> str:
        """People that were written, each on a subject of its own. Captured by a stream."""
        return f"{self.prefix}.personas.written.{job}.{row}.{turn}"

    # Streams and buckets (names take no dots)
    @property
    def stream_scenarios(self) -> str:
        """Keeps scenario events until a director has taken them."""
        return f"{self.prefix}-scenarios"

    @property
    def stream_runs(self) -> str:
        """Keeps status and results of runs, within limits."""
        return f"{self.prefix}-runs"

    @property
    def stream_models(self) -> str:
        """Holds prompts until a model worker has answered them."""
        return f"{self.prefix}-models"

    @property
    def stream_kept(self) -> str:
        """Keeps models' answers of runs, within limits."""
        return f"{self.prefix}-kept"

    @property
    def stream_cache(self) -> str:
        """Keeps models' answers for other runs, within limits."""
        return f"{self.prefix}-cache"

    @property
    def bucket_usage(self) -> str:
        """``<run>.<process>`` to what one model service counted of a run."""
        return f"{self.prefix}-usage"

    @property
    def bucket_budgets(self) -> str:
        """Run to what is spent of its budget."""
        return f"{self.prefix}-budgets"

    @property
    def bucket_limits(self) -> str:
        """Endpoint to the time at which the next request may leave for it."""
        return f"{self.prefix}-limits"

    @property
    def bucket_servers(self) -> str:
        """``<pool>.<process>`` of each model service that serves a pool; entries expire."""
        return f"{self.prefix}-servers"

    @property
    def stream_events(self) -> str:
        """Keeps environments' events, within limits, for durable listeners."""
        return f"{self.prefix}-events"

    @property
    def stream_journal(self) -> str:
        """Keeps what was done to environments until their run is over."""
        return f"{self.prefix}-journal"

    @property
    def stream_states(self) -> str:
        """Keeps what runs held at the end of their last round, until they are deleted."""
        return f"{self.prefix}-states"

    @property
    def bucket_specs(self) -> str:
        """Run to the scenario that it plays."""
        return f"{self.prefix}-specs"

    @property
    def stream_persona_work(self) -> str:
        """Holds populations and people that are to be written."""
        return f"{self.prefix}-persona-work"

    @property
    def stream_persona_written(self) -> str:
        """Keeps people that were written until their population is complete and stored."""
        return f"{self.prefix}-persona-written"

    @property
    def bucket_persona_jobs(self) -> str:
        """Name of a population to what is known of its writing."""
        return f"{self.prefix}-persona-jobs"

    @property
    def bucket_hosts(self) -> str:
        """Host name to its capacity and load; entries expire when a host falls silent."""
        return f"{self.prefix}-hosts"

    @property
    def bucket_keepers(self) -> str:
        """Environment services, by name; entries expire when one falls silent."""
        return f"{self.prefix}-keepers"

    @property
    def bucket_runs(self) -> str:
        """Run name to its latest state."""
        return f"{self.prefix}-run-states"

    @property
    def bucket_pools(self) -> str:
        """Pool name to the model that it serves."""
        return f"{self.prefix}-pools"

    @property
    def bucket_recorder(self) -> str:
        """Which recorder is at work."""
        return f"{self.prefix}-recorder"

    @property
    def bucket_placement(self) -> str:
        """``<run>.<population>`` to the shards of a population, their workers and epoch."""
        return f"{self.prefix}-placement"
