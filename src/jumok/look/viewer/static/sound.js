// A sound that is played: its time moves while it does.

import { make } from "./dom.js";

export class Sound {
  /** `events`: moved(seconds), again and again while it plays; changed(), when it begins or ends; failed(text). */
  constructor(events) {
    this.events = events;
    this.ready = false;
    this.audio = make("audio", {
      preload: "auto",
      onplay: () => this.began(),
      onpause: () => this.ended(),
      onended: () => this.ended(),
      onseeked: () => events.moved(this.time),
      onerror: () => this.ready && this.failed("This browser cannot play the sound."),
    });
  }

  /** The base64 of a WAV file, or null where there is none. */
  load(wave) {
    if (this.wave === wave) return;
    this.stop();
    this.wave = wave;
    this.ready = wave !== null;
    URL.revokeObjectURL(this.url);
    if (!wave) return;
    this.url = URL.createObjectURL(new Blob([bytesOf(wave)], { type: "audio/wav" }));
    this.audio.src = this.url;
  }

  get playing() {
    return !this.audio.paused && !this.audio.ended;
  }

  get time() {
    return this.audio.currentTime;
  }

  toggle() {
    if (this.playing) this.stop();
    else this.play();
  }

  from(seconds) {
    if (!this.ready) return;
    this.audio.currentTime = seconds;
    this.play();
  }

  play() {
    if (this.ready)
      this.audio.play().catch((error) => {
        // Stopped before it began is no fault; that a page may not begin by itself is one that a click helps.
        if (error.name === "NotAllowedError") this.failed("The browser wants a click before it plays.");
        else if (error.name !== "AbortError") this.failed("This browser cannot play the sound.");
      });
  }

  stop() {
    this.audio.pause();
  }

  began() {
    this.events.changed();
    const move = () => {
      if (!this.playing) return;
      this.events.moved(this.time);
      this.frame = requestAnimationFrame(move);
    };
    cancelAnimationFrame(this.frame);
    move();
  }

  ended() {
    cancelAnimationFrame(this.frame);
    this.events.moved(this.time);
    this.events.changed();
  }

  failed(text) {
    this.events.failed(text);
  }

  close() {
    this.stop();
    cancelAnimationFrame(this.frame);
    this.ready = false;
    this.audio.removeAttribute("src");
    URL.revokeObjectURL(this.url);
  }
}

export function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
