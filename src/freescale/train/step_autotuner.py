"""Runs each step with the setting that `overlap.autotune` names, and lets all ranks select the same one."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from freescale.overlap.autotune import Autotuner, Setting
from freescale.overlap.schedule import Schedule
from freescale.train.step import Step
from freescale.transport.selection import TransportSelection
from freescale.transport.world import World


class StepAutotuner:
    """Switches a step between settings and times them."""

    def __init__(
        self,
        step: Step,
        tuner: Autotuner,
        schedules: Mapping[bool, Schedule],
        transports: TransportSelection,
        world: World,
    ) -> None:
        """`schedules`: without and with overlap."""
        self._step, self._tuner, self._schedules, self._transports = step, tuner, schedules, transports
        self._world, self._current, self._began = world, tuner.setting, 0.0

    def begin_step(self) -> bool:
        """Switch to the setting of this step if needed. Returns whether to prefetch the rows of the next batch."""
        if self._tuner.setting != self._current:
            self._current = setting = self._tuner.setting
            urgent = self._transports.urgent_choices[setting.exchange]
            deferred = self._transports.deferred_choices.get(setting.deferred)
            self._step.switch(self._schedules[setting.overlap], urgent, deferred)
        self._began = time.perf_counter()
        return self._step.looks_ahead and self._tuner.keeps_setting

    def end_step(self, log: Callable[[Setting, dict[str, float]], None]) -> None:
        """Record the time of this step. At the end of a trial all ranks select a setting, and `log` is called.

        Its arguments: the selected setting, and the milliseconds of a step with each setting.
        """
        seconds = self._tuner.record(time.perf_counter() - self._began)
        if seconds is None:
            return
        summed = self._world.transport.reduce_values(torch.tensor(seconds, dtype=torch.float64), name="autotune")
        mean = [value / self._world.world_size for value in summed.tolist()]
        selected = self._tuner.decide(mean)
        log(selected, {str(s): 1e3 * value for s, value in zip(self._tuner.settings, mean, strict=True)})

    def state_dict(self) -> dict[str, Any]:
        """Return the selected setting for a checkpoint."""
        return self._tuner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the setting of a checkpoint."""
        self._tuner.load_state_dict(state)
