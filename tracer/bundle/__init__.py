"""Evidence bundles: write one, check one, open one."""

from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.read import Bundle, open_bundle, read_bundle_journals, read_bundle_spans
from kvwitness.tracer.bundle.reports import report_of, reports_by_rid
from kvwitness.tracer.bundle.snapshot import snapshot_journal
from kvwitness.tracer.bundle.source import Problem, ProblemKind
from kvwitness.tracer.bundle.verify import VerifyReport, verify_bundle
from kvwitness.tracer.bundle.write import BundleInfo, BundleInputs, check_destination, write_bundle

__all__ = [
    "Bundle",
    "BundleError",
    "BundleInfo",
    "BundleInputs",
    "Problem",
    "ProblemKind",
    "VerifyReport",
    "check_destination",
    "open_bundle",
    "read_bundle_journals",
    "read_bundle_spans",
    "report_of",
    "reports_by_rid",
    "snapshot_journal",
    "verify_bundle",
    "write_bundle",
]
