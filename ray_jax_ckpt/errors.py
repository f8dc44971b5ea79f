"""Every exception this package raises on purpose.

Each class is also the builtin a caller would expect, so ``except TimeoutError`` works as well as
``except rjc.errors.SnapshotTimeoutError``. All of them pickle, since Ray carries them between processes.

::

    CheckpointError
    ├── ConfigError              (ValueError)           a setting that cannot work
    ├── NoSessionError           (RuntimeError)         called where there is no training run with a CheckpointManager
    ├── RunInUseError            (RuntimeError)         another driver is training this run
    ├── StepError                (ValueError)           a step that is negative, not an int, or goes backwards
    ├── UnsupportedLeafError     (TypeError)            a leaf of the state that cannot be snapshotted
    ├── TreeMismatchError        (ValueError)           a template and a snapshot that do not fit each other
    ├── DataStateError           (ValueError)           per-process `data` that cannot be saved or put back
    ├── SnapshotError            (RuntimeError)         a snapshot that failed after it was taken
    │   ├── SnapshotTimeoutError (TimeoutError)         ... because something did not happen in time
    │   ├── MemoryLimitError     (MemoryError)          ... because it needs more memory than it may have
    │   ├── PersistError         (OSError)              ... because storage did not take it
    │   └── PersistExistsError   (FileExistsError)      ... because there is one already where it was to be written
    ├── RestoreError             (RuntimeError)         a restore that failed
    │   ├── RestoreTimeoutError  (TimeoutError)         ... because something did not happen in time
    │   ├── SnapshotLostError    (FileNotFoundError)    ... because no living store holds a part of it
    │   ├── IntegrityError       (ValueError)           ... because the bytes are not those that were captured
    │   ├── NoCheckpointError    (FileNotFoundError)    ... because there is no checkpoint on storage
    │   └── StorageError         (OSError)              ... because storage did not give what is there
    ├── StoreError               (RuntimeError)         a snapshot store refused or failed
    │   ├── StaleAttemptError    (RuntimeError)         ... because the caller belongs to an older attempt
    │   ├── AlreadyHeldError     (FileExistsError)      ... because it has what it was to be sent
    │   └── AuthenticationError  (PermissionError)      ... because the caller lacks the run's secret
    ├── StateError               (ValueError)           a run's state that cannot be read
    ├── StaleDriverError         (RuntimeError)         a state whose run a newer driver has taken over
    └── NotSupportedError        (NotImplementedError)  something this version does not do
"""


class CheckpointError(Exception):
    """Base of all exceptions of this package."""


class ConfigError(CheckpointError, ValueError):
    """A setting that cannot work."""


class NoSessionError(CheckpointError, RuntimeError):
    """A train-function call made where there is no training run with a ``CheckpointManager``."""


class RunInUseError(CheckpointError, RuntimeError):
    """A run that another, living driver is training. The message says which one.

    It ends the controller: `fit()` raises `ray.train.ControllerError` with this in its text.
    """


class StepError(CheckpointError, ValueError):
    """A step that is negative, not an int, or lower than one already snapshotted in this attempt."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """A leaf of the state that cannot be snapshotted. The message names its path and the remedy."""


class TreeMismatchError(CheckpointError, ValueError):
    """A template and a snapshot, or two ranks' states, that do not fit each other."""


class DataStateError(CheckpointError, ValueError):
    """Per-process ``data`` that cannot be saved, or cannot be put back into this object."""


class SnapshotError(CheckpointError, RuntimeError):
    """A snapshot that failed after it was taken."""


class SnapshotTimeoutError(SnapshotError, TimeoutError):
    """A snapshot that was not stored or protected in time."""


class MemoryLimitError(SnapshotError, MemoryError):
    """Snapshots would need more memory than ``max_bytes`` allows or than the node has."""


class PersistError(SnapshotError, OSError):
    """A checkpoint that could not be written to storage."""


class PersistExistsError(SnapshotError, FileExistsError):
    """A checkpoint that was to be written where there is one."""


class RestoreError(CheckpointError, RuntimeError):
    """A restore that failed."""


class RestoreTimeoutError(RestoreError, TimeoutError):
    """A restore whose decision, peers or bytes did not arrive in time."""


class SnapshotLostError(RestoreError, FileNotFoundError):
    """A snapshot of which no living store holds some part."""


class IntegrityError(RestoreError, ValueError):
    """Bytes that are not the ones that were captured."""


class NoCheckpointError(RestoreError, FileNotFoundError, ValueError):
    """A path on storage at which there is no directory, or no checkpoint."""


class StorageError(RestoreError, OSError):
    """Storage that did not give what is there: access was denied, the connection was lost."""


class StoreError(CheckpointError, RuntimeError):
    """A snapshot store refused a request or failed."""


class StaleAttemptError(StoreError):
    """A request of an attempt that has been superseded by a newer one."""


class AlreadyHeldError(StoreError, FileExistsError):
    """A push of what the receiver holds already, or is receiving."""


class AuthenticationError(StoreError, PermissionError):
    """A connection to a store without the run's secret."""


class StateError(CheckpointError, ValueError):
    """The text of a run's state that is none, or damaged."""


class StaleDriverError(CheckpointError, RuntimeError):
    """The state of a run that a newer driver has taken over: the older one writes it no more."""


class NotSupportedError(CheckpointError, NotImplementedError):
    """Something this version does not do. The message says what to do instead."""
