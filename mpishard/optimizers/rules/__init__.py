"""Update rules, their options and learning rate schedules."""
