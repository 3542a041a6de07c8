"""The things that a user gives and gets: tasks, callbacks, reports."""

from hydra_engine.tasks.callback import Callback, is_called
from hydra_engine.tasks.chooser import BatchChooser, GuidedLoader, LaneSeconds, StepChoice, StepMeasures
from hydra_engine.tasks.evaluation import EvaluationMeans, EvaluationTask
from hydra_engine.tasks.logger import Logger, StepReport, TaskStart, ValidationReport, checked_loggers
from hydra_engine.tasks.model import Model, OneLayer
from hydra_engine.tasks.model_watch import ModelWatch, plain_attributes, restore_attributes
from hydra_engine.tasks.options import EMPTY_VALIDATION, check_optimizer_needs_no_closure, chooses
from hydra_engine.tasks.report import (
    AGAIN,
    FAILED,
    FINISHED,
    PAUSED,
    STOPPED,
    TRAINING_LOSS,
    VALIDATION_LOSS,
    Best,
    CheckpointReport,
    DeviceReport,
    Evaluation,
    KeepBest,
    Plan,
    Report,
    Retry,
    Revision,
    TaskPlan,
    TaskReport,
)
from hydra_engine.tasks.report_file import from_json, to_json
from hydra_engine.tasks.settings import SCHEDULE, Difference, differences, settings_of
from hydra_engine.tasks.splitting import MicroBatch, batch_size, split, split_batch
from hydra_engine.tasks.task import ModelTask, Purpose
