"""The user's handle: gives each training step a budget, and learns from the steps that it sees."""

from outgrow.session.session import Session as Session
from outgrow.session.session import Step as Step
