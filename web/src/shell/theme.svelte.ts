// Light, dark, or what the system says.

export type Theme = 'system' | 'light' | 'dark';
const KEY = 'meshnet.theme';

function stored(): Theme {
  try {
    const value = localStorage.getItem(KEY);
    return value === 'light' || value === 'dark' ? value : 'system';
  } catch {
    return 'system';
  }
}

class ThemeChoice {
  value = $state<Theme>(stored());
  private readonly systemDark = matchMedia('(prefers-color-scheme: dark)');
  private systemIsDark = $state(this.systemDark.matches);

  constructor() {
    this.systemDark.addEventListener('change', (event) => {
      this.systemIsDark = event.matches;
    });
    this.apply();
  }

  get dark(): boolean {
    return this.value === 'dark' || (this.value === 'system' && this.systemIsDark);
  }

  set(value: Theme): void {
    this.value = value;
    this.apply();
    try {
      if (value === 'system') localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, value);
    } catch {
      // Storage is off: the choice holds until the page is left.
    }
  }

  private apply(): void {
    if (this.value === 'system') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.value;
  }
}

export const theme = new ThemeChoice();
