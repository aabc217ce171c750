"""Where data sets come from: public logs, event logs, and made-up ones. Works without torch."""
