"""Agents: subclass ``Agent``, keep state in attributes, write methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from populace._random import AgentRandom, stream_state
from populace._runtime import driver
from populace.memory import Memory
from populace.personas.people import Persona, attributes
from shared.errors import InvalidInputError

if TYPE_CHECKING:
    from typing import Self

    from populace._runtime.listening import Listener
    from populace._runtime.shard import Shard
    from populace.directory import Agents
    from populace.models.handle import ModelHandle
    from populace.proxy import AgentProxy
    from populace.world import World


_INTERVIEW_TOKENS = 256
"""An answer in words needs some, though the scenario's own questions may be for a number."""
_INTERVIEWS = 1 << 41
"""Numbers of questions from here on are of interviews."""


class _AgentType(type):
    """Remembers how an agent was made, so that ``to_dist`` can make it elsewhere."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        agent = super().__call__(*args, **kwargs)
        agent._made_with = (args, kwargs)
        return agent


class Agent(metaclass=_AgentType):
    """One member of a population.

    State lives in attributes. Methods, plain or ``async``, are what others call; an agent
    handles one call at a time, in the order in which a caller made them, so its state never
    races. Methods whose name begins with an underscore can't be called from outside.

    An agent made in the ordinary way is an ordinary object; ``to_dist`` turns it into a
    proxy of an agent that lives in a world.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_deeds",
        "_index",
        "_made_with",
        "_memory",
        "_questions",
        "_random",
        "_shard",
    )

    _shard: Shard
    _index: int
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def to_dist(self, world: World) -> Self:
        """Move the agent into a world; returns a proxy whose methods return placeholders.

        The agent is made anew over there with the arguments of its constructor; what was
        done to this object since then is not carried over.

        Raises:
            CodeError: a worker could not import the class.
        """
        args, kwargs = self._made_with
        return world._place(type(self), args, kwargs)  # type: ignore[return-value]

    def _home(self) -> Shard:
        shard: Shard | None = getattr(self, "_shard", None)
        if shard is None:
            raise InvalidInputError(
                f"this {type(self).__name__} lives in no world yet, so it has no identity, "
                "random stream or model; use to_dist, or a population"
            )
        return shard

    @property
    def id(self) -> str:
        """Its name, unique within the run: population and number."""
        return self._home().agent_name(self._index)

    @property
    def number(self) -> int:
        """Its number within its population, from 0."""
        return self._home().offset + self._index

    @property
    def round(self) -> int:
        """The round of the call under way, from 1; 0 outside of rounds."""
        call = driver.current_call()
        return self._home().round if call is None else call.group.round

    @property
    def random(self) -> AgentRandom:
        """Its own random numbers, which follow from (seed, agent, round) alone."""
        shard = self._home()
        call = driver.current_call()
        key = shard.round_key if call is None else shard.key_of_round(call.group.round)
        held: AgentRandom | None = getattr(self, "_random", None)
        if held is None or held.key != key:
            held = self._random = AgentRandom(stream_state(key, shard.offset + self._index), key)
        return held

    @property
    def persona(self) -> Persona | None:
        """Who it is, where the scenario says so: ``self.persona.age``, ``self.persona.text``."""
        shard = self._home()
        return None if shard.people is None else Persona(shard.people, self._index)

    @property
    def memory(self) -> Memory:
        """What it remembers; goes before each of its prompts."""
        held = getattr(self, "_memory", None)
        if held is None:
            held = self._memory = Memory()
            shard = getattr(self, "_shard", None)
            if shard is not None:
                shard.some_remember = True
        return held

    @property
    def model(self) -> ModelHandle:
        """The language model that it may ask."""
        return self._home().worker.models.handle(self)

    @property
    def agents(self) -> Agents:
        """The run's other agents: ``self.agents["voter/17"]`` is a proxy of that one.

        A number alone means one of its own population; ``len(self.agents)`` is how many there
        are.
        """
        return self._home().others

    def environment(self, path: str) -> AgentProxy:
        """A proxy of the environment at a path, such as ``"world.region1"``.

        Raises:
            LookupError: there is none.
        """
        return self._home().worker.directory.environment(path)

    async def listen(
        self,
        environment: Any,
        event: str = "*",
        handler: Any = "on_event",
        *,
        when: str | None = None,
        below: bool = False,
        durable: bool = False,
    ) -> Listener:
        """Have one of the agent's own methods called with each event, in the order of its mailbox.

        Args:
            environment: its proxy, or its path.
            event: the event's name, or ``"*"`` for all.
            handler: the method, or its name; it takes an ``Event``.
            when: a condition on the event's arguments, such as ``"new > 3"``, evaluated where
                the environment lives.
            below: whether environments below it count as well.
            durable: whether events are kept while the agent's process is away.

        Raises:
            InvalidInputError: no environment, no such method, or a condition that can't be read.
        """
        shard = self._home()
        name = handler if isinstance(handler, str) else handler.__name__
        return await shard.worker.listen(
            shard, self._index, environment, event, name, when=when, below=below, durable=durable
        )

    async def interview(
        self, question: str, *, remember: bool = False, model: str = "default", nonce: int = 0
    ) -> dict[str, Any]:
        """Answer a question beside what goes on in the run; a class may have its own way.

        What the agent asks its models later, and so what they answer, stays the same.

        Args:
            question: in words.
            remember: whether question and answer go into the memory.
            model: which of the run's models answers.
            nonce: what tells this interview from others.

        Returns:
            ``{"text": the answer, "persona": attributes, or None}``.

        Raises:
            ModelFailure: there is no answer.
        """
        before = getattr(self, "_questions", None)
        self._questions = (self.round, _INTERVIEWS + nonce)
        memory = self.memory
        held = list(memory.messages)
        try:
            text = await self.model.ask(question, model=model, max_tokens=_INTERVIEW_TOKENS)
        finally:
            memory.messages[:] = held  # a memory that is summed up when it is used stays as it was
            if before is None:
                del self._questions
            else:
                self._questions = before
        if remember:
            memory.add_user(question)
            memory.add_assistant(text)
        persona = self.persona
        return {"text": text, "persona": None if persona is None else attributes(persona)}

    def _next_question(self) -> int:
        """The number of this agent's next question to a model within the round, from 0."""
        now = self.round
        held = getattr(self, "_questions", None)
        number = held[1] + 1 if held is not None and held[0] == now else 0
        self._questions = (now, number)
        return number

    def _next_deed(self) -> int:
        """The number of this agent's next call to an environment, from 1."""
        number: int = getattr(self, "_deeds", 0) + 1
        self._deeds = number
        self._shard.some_did = True
        return number

    # The function itself: one coroutine less for each of a million sleepers.
    sleep = staticmethod(driver.sleep)
