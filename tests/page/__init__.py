"""Tests of serl_launcher/page: who is let in, what is shown, and what an order does."""
