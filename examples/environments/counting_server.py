"""An OpenEnv server: the policy counts on from a number, one number per turn. ``python counting_server.py PORT``."""

from __future__ import annotations

import argparse
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

TURNS = 2
SESSIONS = 64


class Reply(Action):
    text: str


class Told(Observation):
    text: str


class Counted(State):
    answers: tuple[str, ...] = ()


class Counting(Environment[Reply, Told, Counted]):
    """Each right number earns its share of 1. A wrong one ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = Counted()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        first = 10 + (seed or 0)
        self._state = Counted(episode_id=episode_id, answers=tuple(str(first + 1 + turn) for turn in range(TURNS)))
        return Told(text=f"count from {first}")

    def step(self, action: Reply, timeout_s: float | None = None, **_: Any) -> Told:
        wanted = self._state.answers[self._state.step_count]
        self._state.step_count += 1
        is_right = action.text.strip() == wanted
        is_over = not is_right or self._state.step_count == TURNS
        return Told(text="next", reward=is_right / TURNS, done=is_over)

    @property
    def state(self) -> Counted:
        return self._state


def app() -> Any:
    return create_fastapi_app(Counting, Reply, Told, max_concurrent_envs=SESSIONS, state_cls=Counted)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    uvicorn.run(app(), port=parser.parse_args().port, log_level="warning")
