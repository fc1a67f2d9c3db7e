"""The checks, in the order in which they are shown. To add one: a function here, its test that makes it fail."""

from __future__ import annotations

from slime.doctor.checks import arguments, checkpoint, data, engines, environment, storage
from slime.doctor.finding import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    environment.python_version,
    environment.packages,
    environment.device,
    environment.memory,
    environment.open_files,
    environment.shared_memory,
    environment.ports,
    arguments.arguments,
    arguments.notices,
    arguments.hooks,
    checkpoint.weights,
    checkpoint.resume,
    data.tokenizer,
    data.chat_template,
    data.first_row,
    storage.disk_space,
    engines.imports,
    engines.device_works,
)
