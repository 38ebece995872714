"""The names that server and client use in configs, metrics and reports.

==================== =========== ====================================================
name                 where       meaning
==================== =========== ====================================================
``base-version``     config      version of the model in this message
``local-steps``      config      optimizer steps that the work rule asks for
``dispatch-number``  config      how many messages this node was sent, this included:
                                 a key for the random draws of one training
``num-steps``        metrics     optimizer steps done
``samples-processed`` metrics    examples processed (examples times epochs)
``compute-seconds``  report      time spent training (s)
==================== =========== ====================================================

The report is a `ConfigRecord` under ``"sap"`` in a train reply; it may repeat the
metrics, and echoes ``base-version``.
"""

REPORT_KEY = "sap"
BASE_VERSION = "base-version"
LOCAL_STEPS = "local-steps"
DISPATCH_NUMBER = "dispatch-number"
COMPUTE_SECONDS = "compute-seconds"
NUM_SAMPLES = "samples-processed"
NUM_STEPS = "num-steps"
